// Scores with keys as they are stored (one-pass kernel, see tools.cu, which comes before): integer
// products of codes and queries, which become 16-bit integers. reconstructed.cu is the alternative for
// keys that are reconstructed before RoPE; both define `Scorer`.

constexpr int SCORER_BYTES = 0;
__device__ __forceinline__ void registers_to_score() {}
template <int WARP_ITEMS> __device__ __forceinline__ void registers_to_weigh() {}

// State of a scoring warp, for two sets of four queries. bytes: of query g / 2 (even g: its high
// byte, odd g: its low byte), in the order of codes in words; middles: of query c, what the middle
// code adds to scores; unit: of query c, the factor from integer scores to scores.
struct Scorer {
  static constexpr int REGISTERS = all_registers(KEY_RUNS);
  const int c, g, first;
  const float size;
  u32 bytes[2][REGISTERS];
  int middles[2][KEY_RUNS];
  float unit[2];

  static __device__ __forceinline__ void prepare(u8 *, const u8 *, const u32 *) {}
  __device__ __forceinline__ Scorer(
      u8 *, const u8 *, const u32 *, int warp, int lane, double scale_of_scores)
      : c(lane % 4), g(lane / 4), first(warp * WARP_HEADS), size((float)scale_of_scores) {}

  // q: of the group's first query head.
  __device__ __forceinline__ void begin(const u16 *q) {
    u32 pairs[2][2 * REGISTERS];  // of numbers, as loaded
#pragma unroll
    for (int u = 0; u < 2; u++) {
      const u16 *head_query = q + real_of(first * N + u * 4 + g / 2) * DQ;
      unrolled<KEY_RUNS>([&](auto at) {
        constexpr int R = decltype(at)::value, PER = fields(R);
#pragma unroll
        for (int l = 0; l < loads(R); l++) {
          const int byte = place_of(R, l, c);
          const u32 *from = (const u32 *)(head_query + numbers(R) + byte * PER);
#pragma unroll
          for (int j = 0; j < 2 * PER; j++)
            pairs[u][2 * (all_registers(R) + l * PER) + j] = byte < 2 * key_words[R] ? from[j] : 0;
        }
      });
    }
#pragma unroll
    for (int u = 0; u < 2; u++) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < 2 * REGISTERS; i++) {
        const float low = query_of(pairs[u][i] & 0xFFFF), high = query_of(pairs[u][i] >> 16);
        most = fmaxf(most, fmaxf(fabsf(low), fabsf(high)));
      }
      for (int far = 1; far < 4; far *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, far));
      const float inverse = most > 0 ? MOST_QUERY / most : 0.0f;
      unit[u] = KEY_UNIT * scale_unit(key_bits[0]) * size / MOST_QUERY;
      unit[u] = __shfl_sync(~0u, most > 0 ? most * unit[u] : 1.0f, 8 * c);
      unrolled<KEY_RUNS>([&](auto at) {
        constexpr int R = decltype(at)::value, BITS = key_bits[R], PER = fields(R);
        int total = 0;
#pragma unroll
        for (int l = 0; l < loads(R); l++) {
#pragma unroll
          for (int i = 0; i < PER; i++) {
            u32 four = 0;
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const int number = e * PER + i;
              const u32 pair = pairs[u][2 * (all_registers(R) + l * PER) + number / 2];
              const float x = query_of(number % 2 ? pair >> 16 : pair & 0xFFFF);
              const int whole = __float2int_rn(x * inverse), high = (whole + 128) >> 8;
              total += whole;
              four |= (u32)((g % 2 ? whole - 256 * high : high) & 255) << (8 * e);
            }
            bytes[u][all_registers(R) + l * PER + i] = four;
          }
        }
        for (int far = 1; far < 4; far *= 2) total += __shfl_xor_sync(~0u, total, far);
        const int sum = __shfl_sync(~0u, total, 8 * c);
        middles[u][R] = (int)(-(long long)sum * ((1 << BITS) - 1) / 2);
      });
    }
  }

  // Scores of a page, not yet times unit: of query c of both sets, entries g and g + 8 of every 16.
  __device__ __forceinline__ void score(float (&s)[STEPS][2][2], const u8 *page, int, bool) const {
    unrolled<KEY_RUNS>([&](auto at) {
      constexpr int R = decltype(at)::value, BITS = key_bits[R], PER = fields(R);
      constexpr int WORDS = key_words[R], LOADS = loads(R), REGISTERS = LOADS * PER;
      constexpr int WIDE = side_by_side(R);
      constexpr u32 FIELD = ((1u << BITS) - 1) * 0x01010101u;
      const u8 *codes = page + first * key_next[R] + g * (2 * WORDS) + 4 * WIDE * c;
      const u8 *scales = page + (g * SCALE_ROW + first * key_scale_next[R]) * SCALE;
  #pragma unroll
      for (int step = 0; step < STEPS; step++) {
  #pragma unroll
        for (int h = 0; h < WARP_HEADS; h++) {
          const u8 *row = codes + key_start[R] + h * key_next[R] + step * 32 * WORDS;
          u32 x[LOADS], y[LOADS];
          unrolled<LOADS / WIDE>([&](auto l) {
            constexpr int L = decltype(l)::value * WIDE;
            take<WIDE>(x + L, row + 16 * L);
            take<WIDE>(y + L, row + 16 * L + 16 * WORDS);
          });
          int sum[2 / WARP_HEADS][4];
          if (REGISTERS == 1)
            for (int j = 0; j < 2 / WARP_HEADS; j++)
              sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0;
          unrolled<REGISTERS / 2>([&](auto m) {
            constexpr int M = 2 * decltype(m)::value;
            u32 a[4] = {x[M / PER] >> (BITS * (M % PER)), y[M / PER] >> (BITS * (M % PER)),
                        x[(M + 1) / PER] >> (BITS * ((M + 1) % PER)),
                        y[(M + 1) / PER] >> (BITS * ((M + 1) % PER))};
            if (PER > 1)
              for (int i = 0; i < 4; i++) a[i] &= FIELD;
  #pragma unroll
            for (int j = 0; j < 2 / WARP_HEADS; j++) {
              const u32 *by = bytes[h + j] + all_registers(R) + M;
              if constexpr (M == 0) start(sum[j], a, by[0], by[1]);
              else multiply(sum[j], a, by[0], by[1]);
            }
          });
          if constexpr (REGISTERS % 2)  // only with 8 bits
            for (int j = 0; j < 2 / WARP_HEADS; j++)
              multiply(sum[j], x[LOADS - 1], y[LOADS - 1],
                       bytes[h + j][all_registers(R) + REGISTERS - 1]);
          const int place = key_scale[R] + h * key_scale_next[R] + step * 16 * SCALE_ROW;
          constexpr float SIZE = scale_unit(BITS) / scale_unit(key_bits[0]);
          const float one = key_scale_of(scales, place) * SIZE;
          const float two = key_scale_of(scales, place + 8 * SCALE_ROW) * SIZE;
  #pragma unroll
          for (int j = 0; j < 2 / WARP_HEADS; j++) {
            const int middle = middles[h + j][R];
            const float above = (float)whole_of(sum[j][0], sum[j][1], middle) * one;
            const float below = (float)whole_of(sum[j][2], sum[j][3], middle) * two;
            s[step][h + j][0] = R ? s[step][h + j][0] + above : above;
            s[step][h + j][1] = R ? s[step][h + j][1] + below : below;
          }
        }
      }
    });
  }
};
