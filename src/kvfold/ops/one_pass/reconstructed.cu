// Scores with keys that are reconstructed before RoPE (one-pass kernel, see tools.cu). A KV head
// has a latent z, in segments of codes; its key at position p is R_p (A z + mu). R_p rotates PAIRS
// pairs of numbers (x, y). The first FAST pairs are reconstructed. The others rotate so slowly that
// over a stretch of REACH entries cosine and sine are polynomials of POWERS terms: queries are
// multiplied by the map instead, once per stretch.
//
// Products have 16 rows of fp16 latents. k = 2 i and 2 i + 1 are codes at the same place in two
// words. A reconstructed pair is rotated only by its entry's index within 16 entries, and the query
// is rotated back by the position where these 16 begin: even columns of queries belong to the first
// 16 of 32 entries, odd columns to the others.
//
// Constants defined before, besides those of tools.cu: PAIRS, FAST, REACH, POWERS; D, width of a
// query head, of which the first 2 HALF numbers are rotated; MAP_*, byte offsets of the tables in
// `maps` (see reconstructed.py).

static_assert(POWERS == 4, "eight columns are two powers of four queries, and there are two");
constexpr int SLOW = PAIRS - FAST, TURNS = FAST / 4, BLOCKS = FAST / 8;
__device__ constexpr int products(int runs) {
  return runs == 0 ? 0 : products(runs - 1) + loads(runs - 1) * fields(runs - 1);
}
constexpr int PRODUCTS = products(KEY_RUNS);   // of 16 numbers of a latent each
constexpr int MAP_BYTES = HEADS * BLOCKS * PRODUCTS * 512;  // maps of fast pairs, in shared memory
constexpr int OFFSETS_BYTES = 16 * FAST * 8;   // rotations of pairs within 16 entries
constexpr int FAST_QUERIES = BLOCKS * 16 * 8, ROTATION_BYTES = STEPS * FAST * 4;
constexpr int SET_BYTES = PRODUCTS * 512 + FAST_QUERIES + 64;   // of a set of four queries
constexpr int WARP_BYTES = SETS * SET_BYTES + ROTATION_BYTES;  // per scoring warp
constexpr int MEANS_BYTES = HEADS * FAST * 8;  // of mu, at fast pairs
constexpr int FIXED_BYTES = MAP_BYTES + OFFSETS_BYTES + MEANS_BYTES;
constexpr int SCORER_BYTES = FIXED_BYTES + SCORERS * WARP_BYTES;

// Sixteen warps with 128 registers per thread are launched: eight compute scores, four sum values
// of up to two items each, and four of one item. Registers are redistributed accordingly.
__device__ __forceinline__ void registers_to_score() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
}
template <int WARP_ITEMS> __device__ __forceinline__ void registers_to_weigh() {
  if (WARP_ITEMS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
}

// (y, x) of (x, y).
__device__ __forceinline__ u32 swapped(u32 x) { return __byte_perm(x, 0, 0x1032); }
__device__ __forceinline__ u32 both(u32 x) { return __byte_perm(x, 0, 0x1010); }
__device__ __forceinline__ u32 both_high(u32 x) { return __byte_perm(x, 0, 0x3232); }
__device__ __forceinline__ u32 add_times(u32 a, u32 b, u32 c) {
  u32 x;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  return x;
}
// A pair of a query's numbers as fp32: x and y.
__device__ __forceinline__ float2 pair_at(const u16 *q, int pair) {
  constexpr int REST = D / 2 - HALF;
  if (pair >= D / 2) return make_float2(0, 0);
  const int x = pair < HALF ? pair : HALF + pair;
  const int y = pair < HALF ? HALF + pair : HALF + REST + pair;
  return make_float2(query_of(q[x]), query_of(q[y]));
}

struct Scorer {
  const u8 *maps;        // in global memory
  const u32 *rope;       // cosine and sine of a position's pairs
  const u8 *warp_maps;   // in shared memory, of this warp's KV heads
  const uint2 *offsets;  // (cos, cos), (-sin, sin) by pair / 4, row, pair % 4
  const float2 *means;   // of this warp's first KV head
  u32 *rotations;       // rotations at a tile's entries 0, 16 .., to rotate queries back by
  // Per set of queries: slow pairs in the space of latents, by product (`folded`); fast pairs,
  // fp16, by block, query, pair % 4 (`fast`); and what mu adds to a query's score, by power
  // (`extra`).
  u8 *sets;
  const u16 *q;
  float size;
  int c, g, head, column;
  float unit[SETS];

  __device__ __forceinline__ Scorer(
      u8 *room, const u8 *maps_, const u32 *rope_, int warp, int lane, double scale_of_scores)
      : maps(maps_), rope(rope_), size((float)scale_of_scores), c(lane % 4), g(lane / 4),
        head(warp * 4 * SETS / N), column(warp * 4 * SETS) {
    warp_maps = room + head * (BLOCKS * PRODUCTS * 512) + lane * 16;
    offsets = (const uint2 *)(room + MAP_BYTES) + g * 4 + c;
    means = (const float2 *)(room + MAP_BYTES + OFFSETS_BYTES) + head * FAST + c;
    sets = room + FIXED_BYTES + warp * WARP_BYTES;
    rotations = (u32 *)(sets + SETS * SET_BYTES);
    for (int u = 0; u < SETS; u++) unit[u] = 1.0f;
  }
  __device__ __forceinline__ uint4 *folded(int u) const {
    return (uint4 *)(sets + u * SET_BYTES) + 4 * g + c;
  }
  __device__ __forceinline__ uint2 *fast(int u) const {
    return (uint2 *)(sets + u * SET_BYTES + PRODUCTS * 512) + g / 2 * 4 + c;
  }
  __device__ __forceinline__ const u16 *query(int u) const {
    return q + real_of(column + 4 * u + g / 2) * DQ;
  }
  __device__ __forceinline__ float *extra(int u) const {
    return (float *)(sets + u * SET_BYTES + PRODUCTS * 512 + FAST_QUERIES);
  }
  // Loads maps and tables into shared memory; run by all warps of the block.
  static __device__ __forceinline__ void prepare(u8 *room, const u8 *maps, const u32 *rope) {
    for (int i = threadIdx.x; i < MAP_BYTES / 16; i += blockDim.x)  // all copies in flight together
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   :: "r"(shared_of(room) + 16 * i), "l"(maps + MAP_FAST + 16 * i) : "memory");
    for (int i = threadIdx.x; i < HEADS * FAST; i += blockDim.x)
      ((float2 *)(room + MAP_BYTES + OFFSETS_BYTES))[i] = ((const float2 *)(maps + MAP_FAST_MEAN))[i];
    for (int i = threadIdx.x; i < 16 * FAST; i += blockDim.x) {
      const int pair = i / 64 * 4 + i % 4, row = i / 4 % 16;
      const u32 rotation = rope[row * PAIRS + pair];
      ((uint2 *)(room + MAP_BYTES))[i] = make_uint2(both(rotation), both_high(rotation) ^ 0x8000u);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  __device__ __forceinline__ void begin(const u16 *queries) {
    q = queries;
    __syncwarp();
#pragma unroll 1
    for (int u = 0; u < SETS; u++)
#pragma unroll
      for (int m = 0; m < BLOCKS; m++) {
        const u16 *head_query = query(u);
        const float2 x = pair_at(head_query, 8 * m + c), y = pair_at(head_query, 8 * m + 4 + c);
        fast(u)[m * 16] =
            make_uint2(pair_of(x.x * size, x.y * size), pair_of(y.x * size, y.y * size));
      }
  }
  // Starts to copy a tile's rotations into the buffer of the tile before, which is finished.
  __device__ __forceinline__ void look_up(int start) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < STEPS * FAST / 32; i++) {
      const int at = 32 * i + 4 * g + c;
      const u32 *from = rope + (u64)(start + at / FAST * 16) * PAIRS + at % FAST;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                   :: "r"(shared_of(rotations + at)), "l"(from) : "memory");
    }
  }

  // Multiplies the slow pairs of queries by the map, for the stretch whose middle is `middle`.
  __device__ __forceinline__ void fold(int u, int middle) {
    const int kv_head = head + u * 4 / N;
    const float *powers = (const float *)(maps + MAP_POWERS) + (g % 2) * SLOW;
    const u32 *tile_rotations = rope + (u64)middle * PAIRS + FAST;
    const float2 *mean = (const float2 *)(maps + MAP_SLOW_MEAN) + kv_head * SLOW;
    const u16 *head_query = query(u);
    u32 a[SLOW / 8][4];
    float low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < SLOW / 4; i++) {
      const int pair = 4 * i + c;
      const float2 x = pair_at(head_query, FAST + pair);
      const u32 rotation = tile_rotations[pair];
      const float cos = half_of(rotation & 0xFFFF) * size, sin = half_of(rotation >> 16) * size;
      const float rotated_x = x.x * cos + x.y * sin, rotated_y = x.y * cos - x.x * sin;
      const float gx = g % 2 ? rotated_y : rotated_x, gy = g % 2 ? -rotated_x : rotated_y;
      const float one = powers[pair], two = powers[2 * SLOW + pair];
      const float added = mean[pair].x * gx + mean[pair].y * gy;
      low += added * one, high += added * two;
      a[i / 2][i % 2 * 2] = pair_of(gx * one, gy * one);
      a[i / 2][i % 2 * 2 + 1] = pair_of(gx * two, gy * two);
    }
#pragma unroll
    for (int far = 1; far < 4; far *= 2) {
      low += __shfl_xor_sync(~0u, low, far);
      high += __shfl_xor_sync(~0u, high, far);
    }
    // Row g has power g % 2 of query g / 2, and g % 2 + 2.
    float *to = extra(u) + g / 2 * 4 + g % 2;
    if (c == 0) to[0] = low, to[2] = high;
    const uint4 *map = (const uint4 *)(maps + MAP_SLOW) + kv_head * (PRODUCTS * (SLOW / 8) * 32);
#pragma unroll
    for (int k = 0; k < PRODUCTS; k++) {
      float sum[2][4] = {};
#pragma unroll
      for (int i = 0; i < SLOW / 8; i++) {
        const uint4 b = __ldcg(map + (k * (SLOW / 8) + i) * 32 + g * 4 + c);
        multiply(sum[0], a[i], b.x, b.y);
        multiply(sum[1], a[i], b.z, b.w);
      }
      folded(u)[k * 32] = make_uint4(pair_of(sum[0][0], sum[0][1]), pair_of(sum[1][0], sum[1][1]),
                                  pair_of(sum[0][2], sum[0][3]), pair_of(sum[1][2], sum[1][3]));
    }
  }

  // Unpacks a head's latents of 32 entries, as operands of both products.
  __device__ __forceinline__ void unpack(u32 (&a)[PRODUCTS][2][4], const u8 *page, int kv_head, int first) {
    unrolled<KEY_RUNS>([&](auto at) {
      constexpr int R = decltype(at)::value, BITS = key_bits[R], PER = 16 / BITS;
      constexpr int WORDS = key_words[R], LOADS = loads(R);
      const u8 *row = page + key_start[R] + kv_head * key_next[R] + (first + g) * (2 * WORDS) + 4 * c;
      const int scale_at = (first + g) * SCALE_ROW + key_scale[R] + kv_head * key_scale_next[R];
      const u8 *scales = page + scale_at * SCALE;
#pragma unroll
      for (int half = 0; half < 4; half++) {  // entries g + 8 * half
        const u32 scale = twice(scales + half * 8 * SCALE_ROW * SCALE, BITS);
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
          const u32 x = *(const u32 *)(row + half * 16 * WORDS + 16 * l);
          unrolled<PER>([&](auto of) {
            constexpr int J = decltype(of)::value;
            const int e = l * PER + J;
            a[products(R) + e / 2][half / 2][half % 2 + 2 * (e % 2)] =
                times(centred<BITS, J>(x), scale);
          });
        }
      }
    });
  }
  // A scale as fp16, twice in a register.
  static __device__ __forceinline__ u32 twice(const u8 *at, int bits) {
    if (SCALE == 2) return *(const u16 *)at * 0x10001u;
    u32 x;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h; }"
        : "=r"(x) : "r"(*at * 0x101u));
    return times(x, (u32)((15 - bits) << 10) * 0x10001u);  // 2^-bits
  }

  __device__ __forceinline__ void score(float (&s)[STEPS][SETS][2], const u8 *page, int tile,
                                        bool first) {
    const int start = tile * PAGE;
    if (first) look_up(start);
    if (first || start % REACH == 0)
#pragma unroll 1
      for (int u = 0; u < SETS; u++) fold(u, start / REACH * REACH + REACH / 2);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < SETS * (STEPS / 2); i++) {
      const int u = i % SETS, part = i / SETS;
      u32 a[PRODUCTS][2][4];
      unpack(a, page, head + u * 4 / N, 32 * part);
      float scores[2][2];
      set_slow(scores, a, u, (start + 32 * part) % REACH + g - REACH / 2);
      add_fast(scores, a, u, part);
      unrolled<SETS * (STEPS / 2)>([&](auto at) {
        constexpr int T = decltype(at)::value, TO = T / SETS * 2, U = T % SETS;
        if (i == T) {
          s[TO][U][0] = scores[0][0], s[TO][U][1] = scores[0][1];
          s[TO + 1][U][0] = scores[1][0], s[TO + 1][U][1] = scores[1][1];
        }
      });
    }
    look_up(start + PAGE);
  }

  // Scores of 32 entries by slow pairs. row: offset of the first from the stretch's middle.
  __device__ __forceinline__ void set_slow(
      float (&scores)[2][2], const u32 (&a)[PRODUCTS][2][4], int u, int row) {
    const float4 by = ((const float4 *)extra(u))[c];
    float x[2][4], y[2][4];
#pragma unroll
    for (int step = 0; step < 2; step++) {
      x[step][0] = x[step][2] = by.x, x[step][1] = x[step][3] = by.y;
      y[step][0] = y[step][2] = by.z, y[step][1] = y[step][3] = by.w;
    }
#pragma unroll
    for (int k = 0; k < PRODUCTS; k++) {
      const uint4 b = folded(u)[k * 32];
#pragma unroll
      for (int step = 0; step < 2; step++) {
        multiply(x[step], a[k][step], b.x, b.y);
        multiply(y[step], a[k][step], b.z, b.w);
      }
    }
#pragma unroll
    for (int step = 0; step < 2; step++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float t = (float)(row + 16 * step + 8 * r) * (2.0f / REACH);
        scores[step][r] = x[step][2 * r] + t * (x[step][2 * r + 1] +
            t * (y[step][2 * r] + t * y[step][2 * r + 1]));
      }
  }

  // Adds the scores by fast pairs, which are reconstructed in blocks of 8.
  __device__ __forceinline__ void add_fast(
      float (&scores)[2][2], const u32 (&a)[PRODUCTS][2][4], int u, int part) {
    const int warp_head = u * 4 / N;
    const u32 *back = rotations + (2 * part + g % 2) * FAST + c;
    float sum[2][4] = {};
#pragma unroll
    for (int m = 0; m < BLOCKS; m++) {
      float key[2][2][4];  // of 16 entries, 4 pairs
#pragma unroll
      for (int k = 0; k < PRODUCTS; k++) {
        const uint4 b = *(const uint4 *)(warp_maps + ((warp_head * BLOCKS + m) * PRODUCTS + k) * 512);
        if (k == 0) {
          const float2 x = means[warp_head * FAST + 8 * m], y = means[warp_head * FAST + 8 * m + 4];
          const float first[4] = {x.x, x.y, x.x, x.y}, second[4] = {y.x, y.y, y.x, y.y};
#pragma unroll
          for (int step = 0; step < 2; step++) {
            multiply(key[step][0], a[0][step], b.x, b.y, first);
            multiply(key[step][1], a[0][step], b.z, b.w, second);
          }
          continue;
        }
#pragma unroll
        for (int step = 0; step < 2; step++) {
          multiply(key[step][0], a[k][step], b.x, b.y);
          multiply(key[step][1], a[k][step], b.z, b.w);
        }
      }
      u32 rotated_keys[2][4];
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const uint2 by = offsets[((2 * m + i) * 16 + 8 * r) * 4];
#pragma unroll
          for (int step = 0; step < 2; step++) {
            const u32 x = pair_of(key[step][i][2 * r], key[step][i][2 * r + 1]);
            rotated_keys[step][2 * i + r] = add_times(swapped(x), by.y, times(x, by.x));
          }
        }
      const uint2 x = fast(u)[m * 16];
      const u32 b0 = rotate_back(x.x, back[8 * m]), b1 = rotate_back(x.y, back[8 * m + 4]);
#pragma unroll
      for (int step = 0; step < 2; step++) multiply(sum[step], rotated_keys[step], b0, b1);
    }
#pragma unroll
    for (int step = 0; step < 2; step++)
#pragma unroll
      for (int r = 0; r < 2; r++) scores[step][r] += sum[step][step + 2 * r];
  }
  // (x cos + y sin, y cos - x sin) of (x, y) and (cos, sin).
  static __device__ __forceinline__ u32 rotate_back(u32 x, u32 rotation) {
    return add_times(swapped(x), both_high(rotation) ^ 0x80000000u, times(x, both(rotation)));
  }
};
