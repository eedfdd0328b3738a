// Decode attention in one pass over rows whose values all KV heads share, keys and values in runs
// of 8, 4 and 2 bits. For Hopper: pages come whole by bulk copies.
//
// A block is alone on its multiprocessor. SCORERS warps score pages, eight query heads each (and
// one of their threads copies pages ahead), and leave weights in shared memory, times the scale of
// every run of values; the other warps weigh values by them: 64 numbers of a row each, for all
// query heads.
//
// Queries are whole numbers of 16 bits, split into two bytes, so that keys' codes are multiplied as
// they are, by integer products: the two bytes of four query heads are the eight columns of one.
// Values' codes become fp16, less their middle. Of 16 rows of a product, rows i and i + 8 stand
// side by side: k = 2 i and 2 i + 1.
// Items are (sequence, group); a tile is a page. Words are of 16 bits.
//
// Defined before (see joint.py): PAGE rows, PAGE_BYTES copied of a page, STAGES of them at once; G
// groups of HEADS KV heads, N query heads of each, QUERY_HEADS of all; ITEMS weighing warps; of
// every run its bits, words of a row, byte of the first row and number of its first scale, of keys
// how far on the next head's are; SCALE bytes of a scale, SCALE_ROW of them a row; DQ, DO, DV
// numbers of a row of q, out and part; BF16.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

constexpr int COLS = HEADS * N;            // query heads of a group
constexpr int SCORERS = COLS / 8;
constexpr int OWN = 8 / N;                 // KV heads of a scoring warp
constexpr int STEPS = PAGE / 16;
constexpr int ROW = 2 * PAGE + 16;         // bytes of a query head's weights
constexpr int WEIGHTS = COLS * ROW;        // bytes of one run's
#define NONE_YET __int_as_float(0xFF800000)  // the least score
constexpr float SLACK = 4.0f;              // a top is raised once it is exceeded by 2^SLACK
constexpr int MOST_QUERY = 32512;          // so that both of its bytes fit

// What a weighing warp takes of a row: its run, the first word / 16, of 2 bits which bytes of
// words; and the run's first column of the output.
struct Item { int run, block, half, column; };

__device__ constexpr int key_bits[] = KEY_BITS, key_words[] = KEY_WORDS, key_start[] = KEY_START;
__device__ constexpr int key_next[] = KEY_NEXT, key_scale[] = KEY_SCALE;
__device__ constexpr int key_scale_next[] = KEY_SCALE_NEXT;
__device__ constexpr int value_bits[] = VALUE_BITS, value_words[] = VALUE_WORDS;
__device__ constexpr int value_start[] = VALUE_START, value_scale[] = VALUE_SCALE;
constexpr int KEY_RUNS = sizeof(key_bits) / sizeof(int);
constexpr int VALUE_RUNS = sizeof(value_bits) / sizeof(int);
__device__ constexpr int numbers(int runs) {
  return runs == 0 ? 0 : numbers(runs - 1) + key_words[runs - 1] * (16 / key_bits[runs - 1]);
}

// Of a run of keys: 32-bit words of a row that a thread loads, how many of them side by side, and
// registers of queries, one for every field of a word. Two registers make a product.
__device__ constexpr int loads(int run) { return (2 * key_words[run] + 15) / 16; }
__device__ constexpr int fields(int run) { return 8 / key_bits[run]; }
__device__ constexpr int side_by_side(int run) {
  for (int wide = 4; wide > 1; wide /= 2)
    if (loads(run) % wide == 0 && key_words[run] % (2 * wide) == 0 &&
        key_start[run] % (4 * wide) == 0 && key_next[run] % (4 * wide) == 0) return wide;
  return 1;
}
__device__ constexpr int all_registers(int runs) {
  return runs == 0 ? 0 : all_registers(runs - 1) + loads(runs - 1) * fields(runs - 1);
}
// Byte of a row where a thread's load begins.
__device__ constexpr int place_of(int run, int load, int c) {
  const int wide = side_by_side(run);
  return load / wide * 16 * wide + 4 * wide * c + 4 * (load % wide);
}

__device__ __forceinline__ u32 shared_of(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"
      " @!p bra again; }" :: "r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }"
               :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
      " {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Codes, unsigned, by bytes of queries: 32 numbers, or 16; onto nothing, or onto c.
__device__ __forceinline__ void begin(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
      " {%10,%10,%10,%10};" : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}
__device__ __forceinline__ void multiply(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
      " {%0,%1,%2,%3};" : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(int (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6},"
      " {%0,%1,%2,%3};" : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
__device__ __forceinline__ void load(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_turned(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
// The sum of both bytes' products; what overflows on the way does not in the end.
__device__ __forceinline__ int whole_of(int high, int low, int middle) {
  return (int)(256u * (u32)high + ((u32)low + (u32)middle));
}
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
__device__ __forceinline__ float half_of(u32 bits) {
  float x;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(bits));
  return x;
}
__device__ __forceinline__ float query_of(u16 bits) {
  return BF16 ? __uint_as_float((u32)bits << 16) : half_of(bits);
}
__device__ __forceinline__ u32 output_of(float low, float high) {
  if (!BF16) return pair_of(low, high);
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
// Two or four numbers side by side.
__device__ __forceinline__ void give(void *to, const u32 (&x)[1]) { *(u32 *)to = x[0]; }
__device__ __forceinline__ void give(void *to, const u32 (&x)[2]) {
  *(uint2 *)to = make_uint2(x[0], x[1]);
}
__device__ __forceinline__ void give(void *to, const float (&x)[2]) {
  *(float2 *)to = make_float2(x[0], x[1]);
}
__device__ __forceinline__ void give(void *to, const float (&x)[4]) {
  *(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
}
// Scales of two rows, fp16, so many times too small.
__device__ constexpr float scale_unit(int bits) { return SCALE == 2 ? 1.0f : 1.0f / (1 << bits); }
__device__ __forceinline__ u32 two_scales(const u8 *page, int at, int other) {
  if (SCALE == 2) return ((const u16 *)page)[at] | (u32)((const u16 *)page)[other] << 16;
  u32 x;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h; }"
      : "=r"(x) : "r"(page[at] | (u32)page[other] << 8));
  return x;
}
// A scale of keys, so many times too small: what stands for an fp8 number's bits as a float's, even
// where it is subnormal.
constexpr float KEY_UNIT = SCALE == 2 ? 1.0f : 0x1p120f;
__device__ __forceinline__ float key_scale_of(const u8 *page, int at) {
  if (SCALE == 2) return half_of(((const u16 *)page)[at]);
  return __uint_as_float((u32)page[at] << 20);
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 x;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}

// Code J of two words, less the middle of all codes, 2 * factor times too large.
template <int BITS, int J> __device__ __forceinline__ u32 centred(u32 words) {
  constexpr int PER = 8 / BITS, PLACE = BITS * (J % PER);
  constexpr u32 MOST = (1u << BITS) - 1;
  constexpr u32 FIELD = (MOST << (PLACE + 1)) * 0x10001u;
  constexpr u32 MIDDLE = (0x6400u + (MOST << PLACE)) * 0x10001u;
  u32 x = J < PER ? words << 1 : words >> 7, y;
  asm("{ .reg .b32 t; lop3.b32 t, %1, %2, 0x64006400, 0xEA; sub.f16x2 %0, t, %3; }"
      : "=r"(y) : "r"(x), "n"(FIELD), "r"(MIDDLE));
  return y;
}

template <int WIDE> __device__ __forceinline__ void take(u32 *x, const u8 *from) {
  if constexpr (WIDE == 1) x[0] = *(const u32 *)from;
  if constexpr (WIDE == 2) {
    const uint2 y = *(const uint2 *)from;
    x[0] = y.x, x[1] = y.y;
  }
  if constexpr (WIDE == 4) {
    const uint4 y = *(const uint4 *)from;
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }
}

template <int I> struct At { static constexpr int value = I; };
template <int I, int END, class F> struct Loop {
  static __device__ __forceinline__ void run(F &f) { f(At<I>()); Loop<I + 1, END, F>::run(f); }
};
template <int END, class F> struct Loop<END, END, F> {
  static __device__ __forceinline__ void run(F &) {}
};
template <int END, class F> __device__ __forceinline__ void each(F f) { Loop<0, END, F>::run(f); }

// A scoring warp's. Of query g / 2 (even g: its higher byte) of both sets of four: bytes, as codes
// lie in words; of query c what is to be taken off for the codes' middle, and what a whole number
// stands for.
struct Queries {
  static constexpr int REGISTERS = all_registers(KEY_RUNS);
  u32 bytes[2][REGISTERS];
  int middles[2][KEY_RUNS];
  float unit[2];

  __device__ __forceinline__ Queries(const u16 *q, int c, int g, double scale_of_scores) {
    u32 pairs[2][2 * REGISTERS];  // of numbers, as they come
#pragma unroll
    for (int u = 0; u < 2; u++) {
      const u16 *own = q + (u * 4 + g / 2) * DQ;
      each<KEY_RUNS>([&](auto at) {
        constexpr int R = decltype(at)::value, PER = fields(R);
#pragma unroll
        for (int l = 0; l < loads(R); l++) {
          const int byte = place_of(R, l, c);
          const u32 *from = (const u32 *)(own + numbers(R) + byte * PER);
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
      unit[u] = KEY_UNIT * scale_unit(key_bits[0]) * (float)scale_of_scores / MOST_QUERY;
      unit[u] = __shfl_sync(~0u, most > 0 ? most * unit[u] : 1.0f, 8 * c);
      each<KEY_RUNS>([&](auto at) {
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
};

// Scores of a page before their unit: of query c of both sets, rows g and g + 8 of every 16.
__device__ __forceinline__ void score(
    float (&s)[STEPS][2][2], const Queries &queries, const u8 *page, int first, int c, int g) {
  each<KEY_RUNS>([&](auto at) {
    constexpr int R = decltype(at)::value, BITS = key_bits[R], PER = fields(R);
    constexpr int WORDS = key_words[R], LOADS = loads(R), REGISTERS = LOADS * PER;
    constexpr int WIDE = side_by_side(R);
    constexpr u32 FIELD = ((1u << BITS) - 1) * 0x01010101u;
    const u8 *codes = page + first * key_next[R] + g * (2 * WORDS) + 4 * WIDE * c;
    const u8 *scales = page + (g * SCALE_ROW + first * key_scale_next[R]) * SCALE;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
      for (int h = 0; h < OWN; h++) {
        const u8 *row = codes + key_start[R] + h * key_next[R] + step * 32 * WORDS;
        u32 x[LOADS], y[LOADS];
        each<LOADS / WIDE>([&](auto l) {
          constexpr int L = decltype(l)::value * WIDE;
          take<WIDE>(x + L, row + 16 * L);
          take<WIDE>(y + L, row + 16 * L + 16 * WORDS);
        });
        int sum[2 / OWN][4];
        if (REGISTERS == 1)
          for (int j = 0; j < 2 / OWN; j++)
            sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0;
        each<REGISTERS / 2>([&](auto m) {
          constexpr int M = 2 * decltype(m)::value;
          u32 a[4] = {x[M / PER] >> (BITS * (M % PER)), y[M / PER] >> (BITS * (M % PER)),
                      x[(M + 1) / PER] >> (BITS * ((M + 1) % PER)),
                      y[(M + 1) / PER] >> (BITS * ((M + 1) % PER))};
          if (PER > 1)
            for (int i = 0; i < 4; i++) a[i] &= FIELD;
#pragma unroll
          for (int j = 0; j < 2 / OWN; j++) {
            const u32 *by = queries.bytes[h + j] + all_registers(R) + M;
            if constexpr (M == 0) begin(sum[j], a, by[0], by[1]);
            else multiply(sum[j], a, by[0], by[1]);
          }
        });
        if constexpr (REGISTERS % 2)  // of 8 bits alone
          for (int j = 0; j < 2 / OWN; j++)
            multiply(sum[j], x[LOADS - 1], y[LOADS - 1],
                     queries.bytes[h + j][all_registers(R) + REGISTERS - 1]);
        const int place = key_scale[R] + h * key_scale_next[R] + step * 16 * SCALE_ROW;
        constexpr float SIZE = scale_unit(BITS) / scale_unit(key_bits[0]);
        const float one = key_scale_of(scales, place) * SIZE;
        const float two = key_scale_of(scales, place + 8 * SCALE_ROW) * SIZE;
#pragma unroll
        for (int j = 0; j < 2 / OWN; j++) {
          const int middle = queries.middles[h + j][R];
          const float above = (float)whole_of(sum[j][0], sum[j][1], middle) * one;
          const float below = (float)whole_of(sum[j][2], sum[j][3], middle) * two;
          s[step][h + j][0] = R ? s[step][h + j][0] + above : above;
          s[step][h + j][1] = R ? s[step][h + j][1] + below : below;
        }
      }
    }
  });
}

struct Work {  // the tiles of a slice, item by item
  int item, tile, end_item, end_tile, b, g, length, stop;
  __device__ Work(const int *starts, int slice) {
    item = starts[2 * slice], tile = starts[2 * slice + 1];
    end_item = starts[2 * slice + 2], end_tile = starts[2 * slice + 3];
  }
  __device__ bool more() const { return item < end_item || (item == end_item && tile < end_tile); }
  __device__ bool begin(const int *lengths, int length_slot, const u64 *slots) {
    b = item / G, g = item % G;
    length = lengths[slots[b] * length_slot + g];
    stop = (length + PAGE - 1) / PAGE;
    if (item == end_item) stop = end_tile;
    return tile < stop;
  }
  __device__ void next() { item++, tile = 0; }
};

struct Pages {  // copied ahead by one thread, in the order in which they are read
  Work work;
  int stage, next;  // where the next goes, and which it is: looked up a page earlier, or NONE
  u32 phase;
  bool within;      // an item has begun
  static constexpr int NONE = -1;
  __device__ Pages(const int *starts, int slice)
      : work(starts, slice), stage(0), next(NONE), phase(0), within(false) {}
  __device__ void look_up(const int *tables, int table_slot, int table_group, const int *lengths,
                          int length_slot, const u64 *slots) {
    next = NONE;
    while (!within) {
      if (!work.more()) return;
      within = work.begin(lengths, length_slot, slots);
      if (!within) work.next();
    }
    next = tables[slots[work.b] * table_slot + (u64)work.g * table_group + work.tile];
    if (++work.tile == work.stop) work.next(), within = false;
  }
  __device__ void copy(u32 room, u32 full, u32 empty, const u8 *arena) {
    if (next == NONE) return;
    wait(empty + 8 * stage, phase ^ 1);
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1; }"
                 :: "r"(full + 8 * stage), "r"(PAGE_BYTES) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2,"
                 " [%3];" :: "r"(room + stage * PAGE_BYTES), "l"(arena + (u64)(u32)next * 64),
                 "r"(PAGE_BYTES), "r"(full + 8 * stage) : "memory");
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// Codes of a word that an item takes: all of 4 bits; of 8 those of two words; of 2 one byte's.
template <int BITS, class Take>
__device__ __forceinline__ void weigh(
    u32 page, u32 weights, const Item &mine, int start, int words, int lane, Take take) {
  const int in = lane / 8, own = lane % 8, row = 4 * (in / 2) + own / 2 + 8 * (own % 2);
  u32 value = page + start + row * (2 * words) + (mine.block * 16 + 8 * (in % 2)) * 2;
  u32 weight = weights + (own + 8 * (in / 2)) * ROW + (in % 2) * 16;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    u32 w[COLS / 8][2];
#pragma unroll
    for (int n = 0; n < COLS / 8; n += 2) {
      u32 x[4];
      load(x, weight + n * 8 * ROW + step * 32);
      w[n][0] = x[0], w[n][1] = x[1], w[n + 1][0] = x[2], w[n + 1][1] = x[3];
    }
    u32 v[4], next[4];
    load_turned(v, value + step * 32 * words);
    if (BITS == 8) load_turned(next, value + step * 32 * words + 32);
    each<4>([&](auto at) {
      constexpr int I = decltype(at)::value;
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if constexpr (BITS == 8) a[i] = centred<8, I % 2>(I < 2 ? v[i] : next[i]);
        if constexpr (BITS == 4) a[i] = centred<4, I>(v[i]);
        if constexpr (BITS == 2) a[i] = centred<2, I>(v[i] >> (8 * mine.half));
      }
#pragma unroll
      for (int n = 0; n < COLS / 8; n++) take(At<I>(), n, a, w[n]);
    });
  }
}

extern "C" __global__ void __launch_bounds__((SCORERS + ITEMS) * 32, 1) joint_kernel(
    const u16 *q, int q_stride, u16 *out, float *lse, float *part, float *part_ml, const u8 *arena,
    const int *tables, int table_slot, int table_group, const int *lengths, int length_slot,
    const u64 *slots, const Item *items, const int *starts, const int *counts,
    double scale_of_scores) {
  extern __shared__ __align__(128) u8 room[];
  u8 *weights = room + STAGES * PAGE_BYTES;                      // [2][VALUE_RUNS][COLS][ROW]
  float *fades = (float *)(weights + 2 * VALUE_RUNS * WEIGHTS);  // [2][COLS]
  float *masses = fades + 2 * COLS;                              // [COLS], at the end
  u32 *faded = (u32 *)(masses + COLS);                           // [2][SCORERS]
  const u32 full = shared_of(faded + 2 * SCORERS), empty = full + 8 * STAGES;
  const u32 ready = empty + 8 * STAGES, done = ready + 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    auto begin = [](u32 barrier, int arrivals) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
    };
    for (int i = 0; i < STAGES; i++) begin(full + 8 * i, 1), begin(empty + 8 * i, SCORERS + ITEMS);
    for (int i = 0; i < 2; i++) begin(ready + 8 * i, SCORERS), begin(done + 8 * i, ITEMS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  const int slice = blockIdx.x;
  const u32 pages = shared_of(room);
  Work work(starts, slice);
  int stage = 0, buffer = 0;
  u32 phase = 0, turn = 0;  // of the ring of pages, of the two buffers of weights

  const int c = lane % 4, g = lane / 4;
  if (warp < SCORERS) {
    const int column = warp * 8 + c;  // its first query head
    Pages ahead(starts, slice);
    auto copy = [&]() {
      if (threadIdx.x == 0) {
        ahead.copy(pages, full, empty, arena);
        ahead.look_up(tables, table_slot, table_group, lengths, length_slot, slots);
      }
      __syncwarp();
    };
    for (int i = 0; i < STAGES; i++) copy();  // the first looks up only
    for (; work.more(); work.next()) {
      if (!work.begin(lengths, length_slot, slots)) continue;
      const Queries queries(q + (u64)work.b * q_stride + (work.g * COLS + warp * 8) * DQ, c, g,
                            scale_of_scores);
      float top[2] = {NONE_YET, NONE_YET}, mass[2] = {0, 0};
      for (int t = work.tile; t < work.stop; t++) {
        const u8 *page = room + stage * PAGE_BYTES;
        wait(full + 8 * stage, phase);
        const int rows = work.length - t * PAGE;
        float s[STEPS][2][2];
        score(s, queries, page, warp * OWN, c, g);
        const u8 *own = page + g * SCALE_ROW * SCALE;
        float peak[2] = {NONE_YET, NONE_YET}, fade[2];
#pragma unroll
        for (int u = 0; u < 2; u++) {
#pragma unroll
          for (int step = 0; step < STEPS; step++) {
            if (rows < PAGE) {
              if (g + step * 16 >= rows) s[step][u][0] = NONE_YET;
              if (g + step * 16 + 8 >= rows) s[step][u][1] = NONE_YET;
            }
            peak[u] = fmaxf(peak[u], fmaxf(s[step][u][0], s[step][u][1]));
          }
          for (int far = 4; far < 32; far *= 2)
            peak[u] = fmaxf(peak[u], __shfl_xor_sync(~0u, peak[u], far));
          peak[u] *= queries.unit[u];
          bool raise = peak[u] > top[u] + SLACK || t == work.tile;
          float old = top[u];
          top[u] = raise ? peak[u] : old;
          fade[u] = raise ? exp2_of(old - peak[u]) : 1.0f;
          mass[u] *= fade[u];
        }
        bool any = __any_sync(~0u, fade[0] != 1.0f || fade[1] != 1.0f);
        wait(done + 8 * buffer, turn ^ 1);
        u8 *to = weights + buffer * VALUE_RUNS * WEIGHTS + column * ROW + 4 * g;
        if (g == 0)
          fades[buffer * COLS + column] = fade[0], fades[buffer * COLS + column + 4] = fade[1];
        if (lane == 0) faded[buffer * SCORERS + warp] = any;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
          u32 p[2];
#pragma unroll
          for (int u = 0; u < 2; u++) {
            const float above = exp2_of(s[step][u][0] * queries.unit[u] - top[u]);
            const float below = exp2_of(s[step][u][1] * queries.unit[u] - top[u]);
            mass[u] += above + below;
            p[u] = pair_of(above, below);
          }
          each<VALUE_RUNS>([&](auto at) {
            constexpr int R = decltype(at)::value;
            const int place = value_scale[R] + step * 16 * SCALE_ROW;
            u32 scales = two_scales(own, place, place + 8 * SCALE_ROW);
            if (rows < PAGE) {  // what lies beyond may be anything
              scales &= (g + step * 16 < rows ? 0xFFFF : 0) |
                        (g + step * 16 + 8 < rows ? 0xFFFF0000 : 0);
            }
            u8 *at_run = to + R * WEIGHTS + step * 32;
            *(u32 *)at_run = times(p[0], scales);
            *(u32 *)(at_run + 4 * ROW) = times(p[1], scales);
          });
        }
        __syncwarp();
        if (lane == 0) arrive(ready + 8 * buffer), arrive(empty + 8 * stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
        if (++buffer == 2) buffer = 0, turn ^= 1;
        copy();  // to where the page before this one was, whose values the others have weighed
      }
      for (int i = 0; i < 2; i++)
        for (int far = 4; far < 32; far *= 2) mass[i] += __shfl_xor_sync(~0u, mass[i], far);
      wait(done + 8 * buffer, turn ^ 1);
      for (int u = 0; g == 0 && u < 2; u++) {
        const int at = column + 4 * u;
        masses[at] = mass[u];
        if (counts[work.item] == 1) {
          lse[work.b * QUERY_HEADS + work.g * COLS + at] = top[u] + log2f(mass[u]);
        } else {
          float *to = part_ml + (u64)(slice + work.item) * 2 * COLS + at;
          to[0] = top[u], to[COLS] = mass[u];
        }
      }
      __syncwarp();
      if (lane == 0) arrive(ready + 8 * buffer);
      if (++buffer == 2) buffer = 0, turn ^= 1;
    }
    return;
  }

  const Item mine = items[warp - SCORERS];
  const int start = value_start[mine.run], words = value_words[mine.run];
  const int bits = value_bits[mine.run];
  for (; work.more(); work.next()) {
    if (!work.begin(lengths, length_slot, slots)) continue;
    float sums_of[4][COLS / 8][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int n = 0; n < COLS / 8; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) sums_of[i][n][k] = 0;
    for (int t = work.tile; t < work.stop; t++) {
      const u32 page = pages + stage * PAGE_BYTES;
      const u32 own = shared_of(weights) + (buffer * VALUE_RUNS + mine.run) * WEIGHTS;
      wait(full + 8 * stage, phase);
      wait(ready + 8 * buffer, turn);
      bool any = false;
#pragma unroll
      for (int w = 0; w < SCORERS; w++) any |= faded[buffer * SCORERS + w] != 0;
      if (any) {
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
          float2 fade = *(const float2 *)(fades + buffer * COLS + n * 8 + 2 * c);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            sums_of[i][n][0] *= fade.x, sums_of[i][n][1] *= fade.y;
            sums_of[i][n][2] *= fade.x, sums_of[i][n][3] *= fade.y;
          }
        }
      }
      auto take = [&](auto at, int n, const u32 (&a)[4], const u32 (&w)[2]) {
        multiply(sums_of[decltype(at)::value][n], a, w[0], w[1]);
      };
      if (bits == 8) weigh<8>(page, own, mine, start, words, lane, take);
      else if (bits == 4) weigh<4>(page, own, mine, start, words, lane, take);
      else weigh<2>(page, own, mine, start, words, lane, take);
      __syncwarp();
      if (lane == 0) arrive(done + 8 * buffer), arrive(empty + 8 * stage);
      if (++stage == STAGES) stage = 0, phase ^= 1;
      if (++buffer == 2) buffer = 0, turn ^= 1;
    }
    wait(ready + 8 * buffer, turn);
    const int count = counts[work.item];
    auto finish = [&](auto of) {
      constexpr int BITS = decltype(of)::value, PER = 16 / BITS, SIDE = BITS == 8 ? 2 : 4;
#pragma unroll
      for (int n = 0; n < COLS / 8; n++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int column = n * 8 + 2 * c + k % 2;
          const float share = count == 1 ? __fdividef(0.5f, masses[column]) : 0.5f;
          const float size = share * scale_unit(BITS);
#pragma unroll
          for (int i = 0; i < 4; i += SIDE) {  // numbers side by side
            const int word = mine.block * 16 + (BITS == 8 ? 8 * i : 0) + g + 8 * (k / 2);
            const int number = mine.column + word * PER + (BITS == 2 ? 4 * mine.half : 0);
            if (word >= words) continue;
            float x[SIDE];
#pragma unroll
            for (int j = 0; j < SIDE; j++)
              x[j] = sums_of[i + j][n][k] * (size / (1 << (BITS * (j % (8 / BITS)))));
            const u64 row = (u64)work.b * QUERY_HEADS + work.g * COLS + column;
            if (count == 1) {
              u32 two[SIDE / 2];
#pragma unroll
              for (int j = 0; j < SIDE / 2; j++) two[j] = output_of(x[2 * j], x[2 * j + 1]);
              give(out + row * DO + number, two);
            } else {
              give(part + ((u64)(slice + work.item) * COLS + column) * DV + number, x);
            }
          }
        }
      }
    };
    if (bits == 8) finish(At<8>());
    else if (bits == 4) finish(At<4>());
    else finish(At<2>());
    __syncwarp();
    if (lane == 0) arrive(done + 8 * buffer);
    if (++buffer == 2) buffer = 0, turn ^= 1;
  }
}
