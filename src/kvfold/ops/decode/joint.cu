// Decode attention in one pass over rows that all KV heads share, keys and values in runs of 8, 4
// and 2 bits. For Hopper: pages come whole by bulk copies.
//
// A block is alone on its multiprocessor. SCORERS warps score pages, eight query heads each (and one of
// their threads copies pages ahead), and leave weights in shared memory, times the scale of every run of values; the
// other warps weigh values by them: 64 numbers of a row each, for all query heads.
// Items are (sequence, group); a tile is a page. Words are of 16 bits. Codes become fp16 as in
// common/codes_triton: of keys as subnormal numbers, of values from their middle.
//
// Defined before (see joint.py): PAGE rows, PAGE_BYTES copied of a page, STAGES of them at once; G
// groups of HEADS KV heads, N query heads of each, QUERY_HEADS of all; ITEMS weighing warps; of every
// run its bits, words of a row, byte of the first row and number of its first scale, of keys how far
// on the next head's are; SCALE bytes of a scale, SCALE_ROW of them a row; DQ, DO, DV numbers of a
// row of q, out and part; BF16.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

constexpr int COLS = HEADS * N;            // query heads of a group
constexpr int SCORERS = COLS / 8;
constexpr int OWN = 8 / N;                 // KV heads of a scoring warp
constexpr int STEPS = PAGE / 16;
constexpr int ROW = 2 * COLS + 16;         // bytes of a row of weights: no two rows in a bank
constexpr int WEIGHTS = PAGE * ROW;        // bytes of one run's
constexpr float UNIT = 16777216.0f;
constexpr float SLACK = 4.0f;              // a top is raised once it is exceeded by 2^SLACK

// What a weighing warp takes of a row: its run, the first word / 16, of 2 bits which bytes of words;
// and the run's first column of the output.
struct Item { int run, block, half, column; };

__device__ constexpr int key_bits[] = KEY_BITS, key_words[] = KEY_WORDS, key_start[] = KEY_START;
__device__ constexpr int key_next[] = KEY_NEXT, key_scale[] = KEY_SCALE;
__device__ constexpr int key_scale_next[] = KEY_SCALE_NEXT;
__device__ constexpr int value_bits[] = VALUE_BITS, value_words[] = VALUE_WORDS;
__device__ constexpr int value_start[] = VALUE_START, value_scale[] = VALUE_SCALE;
constexpr int KEY_RUNS = sizeof(key_bits) / sizeof(int), VALUE_RUNS = sizeof(value_bits) / sizeof(int);

// Steps of a run: of 16 words, and one of 8 where no more are left.
__device__ constexpr int wide_steps(int words) { return words / 16 + (words % 16 > 8); }
__device__ constexpr int narrow_steps(int words) { return words % 16 > 0 && words % 16 <= 8; }
__device__ constexpr int query_registers(int run) {
  return (2 * wide_steps(key_words[run]) + narrow_steps(key_words[run])) * (16 / key_bits[run]);
}
__device__ constexpr int all_registers(int runs) {
  return runs == 0 ? 0 : all_registers(runs - 1) + query_registers(runs - 1);
}
__device__ constexpr int factor(int bits, int j) { return 1 << (bits * (j % (8 / bits))); }

__device__ __forceinline__ u32 shared_of(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"
      " @!p bra again; }" :: "r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
      " {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6},"
      " {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
__device__ __forceinline__ void load_turned(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
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
// Scales of two rows, fp16, so many times too small.
__device__ constexpr float scale_unit(int bits) { return SCALE == 2 ? 1.0f : 1.0f / (1 << bits); }
__device__ __forceinline__ u32 two_scales(const u8 *page, int at, int other) {
  if (SCALE == 2) return ((const u16 *)page)[at] | (u32)((const u16 *)page)[other] << 16;
  u32 x;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h; }"
      : "=r"(x) : "r"(page[at] | (u32)page[other] << 8));
  return x;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 x;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}

// Code J of two words, alone in an fp16 each: a subnormal number.
template <int BITS, int J> __device__ __forceinline__ u32 subnormal(u32 words) {
  constexpr int PER = 8 / BITS;
  constexpr u32 FIELD = ((1u << BITS) - 1) << (BITS * (J % PER));
  return (J < PER ? words : words >> 8) & (FIELD * 0x10001u);
}
// And less the middle of all codes, 2 * factor times too large.
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

template <int I> struct At { static constexpr int value = I; };
template <int I, int END, class F> struct Loop {
  static __device__ __forceinline__ void run(F &f) { f(At<I>()); Loop<I + 1, END, F>::run(f); }
};
template <int END, class F> struct Loop<END, END, F> {
  static __device__ __forceinline__ void run(F &) {}
};
template <int END, class F> __device__ __forceinline__ void each(F f) { Loop<0, END, F>::run(f); }

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
  int stage;
  u32 phase;
  bool within;  // an item has begun
  __device__ Pages(const int *starts, int slice) : work(starts, slice), stage(0), phase(0), within(false) {}
  __device__ void copy(u32 room, u32 full, u32 empty, const u8 *arena, const int *tables,
                       int table_slot, int table_group, const int *lengths, int length_slot,
                       const u64 *slots) {
    while (!within) {
      if (!work.more()) return;
      within = work.begin(lengths, length_slot, slots);
      if (!within) work.next();
    }
    u64 page = (u64)tables[slots[work.b] * table_slot + (u64)work.g * table_group + work.tile];
    wait(empty + 8 * stage, phase ^ 1);
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1; }"
                 :: "r"(full + 8 * stage), "r"(PAGE_BYTES) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2,"
                 " [%3];" :: "r"(room + stage * PAGE_BYTES), "l"((u64)arena + page * 64),
                 "r"(PAGE_BYTES), "r"(full + 8 * stage) : "memory");
    if (++stage == STAGES) stage = 0, phase ^= 1;
    if (++work.tile == work.stop) work.next(), within = false;
  }
};

// Codes of a word that an item takes: all of 4 bits; of 8 those of two words; of 2 one byte's.
template <int BITS, class Take>
__device__ __forceinline__ void weigh(
    u32 page, u32 weights, const Item &mine, int start, int words, int lane, Take take) {
  const int in = lane / 8, own = lane % 8;
  u32 value = page + start + (own + 8 * (in / 2)) * (2 * words) + (mine.block * 16 + 8 * (in % 2)) * 2;
  u32 weight = weights + (own + 8 * (in % 2)) * ROW + (in / 2) * 16;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    u32 w[COLS / 8][2];
#pragma unroll
    for (int n = 0; n < COLS / 8; n += 2) {
      u32 x[4];
      load_turned(x, weight + step * 16 * ROW + n * 16);
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
  u8 *weights = room + STAGES * PAGE_BYTES;                 // [2][VALUE_RUNS][PAGE][ROW]
  float *fades = (float *)(weights + 2 * VALUE_RUNS * WEIGHTS);  // [2][COLS]
  float *sums = fades + 2 * COLS;                           // [2][COLS]: tops and masses at the end
  u32 *faded = (u32 *)(sums + 2 * COLS);                    // [2][SCORERS]
  u32 barriers = shared_of(faded + 2 * 4 + 0);
  const u32 full = barriers, empty = full + 8 * STAGES, ready = empty + 8 * STAGES, done = ready + 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * i));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + 8 * i), "r"(SCORERS + ITEMS));
    }
    for (int i = 0; i < 2; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(ready + 8 * i), "r"(SCORERS));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(done + 8 * i), "r"(ITEMS));
    }
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
    const int first = warp * OWN;                   // its first KV head
    Pages ahead(starts, slice);
    auto copy = [&]() {
      if (threadIdx.x == 0)
        ahead.copy(pages, full, empty, arena, tables, table_slot, table_group, lengths, length_slot, slots);
      __syncwarp();
    };
    for (int i = 0; i + 1 < STAGES; i++) copy();
    const int head = first + (2 * c) / N;           // whose scores this thread finishes
    for (; work.more(); work.next()) {
      if (!work.begin(lengths, length_slot, slots)) continue;
      // Queries of every step, 0 where a column is another head's.
      u32 queries[OWN][all_registers(KEY_RUNS)];
      float low[KEY_RUNS][2];
      each<KEY_RUNS>([&](auto at) {
        constexpr int R = decltype(at)::value, BITS = key_bits[R], C = 16 / BITS;
        constexpr int WIDE = 2 * wide_steps(key_words[R]), MORE = narrow_steps(key_words[R]);
        int column = 0;
        for (int r = 0; r < R; r++) column += key_words[r] * (16 / key_bits[r]);
        float total = 0;
#pragma unroll
        for (int h = 0; h < OWN; h++) {
          const u16 *own = q + (u64)work.b * q_stride + (work.g * COLS + warp * 8 + g) * DQ + column;
#pragma unroll
          for (int s = 0; s < WIDE + MORE; s++) {
            int word = 2 * (4 * s + c);
            bool there = g / N == h && word < key_words[R];
            each<C>([&](auto j) {
              constexpr int J = decltype(j)::value;
              float x = there ? query_of(own[word * C + J]) : 0.0f;
              float y = there ? query_of(own[(word + 1) * C + J]) : 0.0f;
              u32 two = pair_of(x * (1.0f / factor(BITS, J)), y * (1.0f / factor(BITS, J)));
              total += (half_of(two & 0xFFFF) + half_of(two >> 16)) * factor(BITS, J);
              queries[h][all_registers(R) + s * C + J] = two;
            });
          }
        }
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        total *= -(((1 << BITS) - 1) / 2.0f) / UNIT;
        low[R][0] = __shfl_sync(~0u, total, 8 * c);
        low[R][1] = __shfl_sync(~0u, total, 8 * c + 4);
      });
      float top[2] = {__int_as_float(0xFF800000), __int_as_float(0xFF800000)}, mass[2] = {0, 0};
      for (int t = work.tile; t < work.stop; t++) {
        const u8 *page = room + stage * PAGE_BYTES;
        wait(full + 8 * stage, phase);
        const int rows = work.length - t * PAGE;
        float s[STEPS][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
          for (int i = 0; i < 4; i++) s[step][i] = 0;
          each<KEY_RUNS>([&](auto at) {
            constexpr int R = decltype(at)::value, BITS = key_bits[R], C = 16 / BITS;
            constexpr int WORDS = key_words[R], WIDE = wide_steps(WORDS);
            float sum[2][4] = {{low[R][0], low[R][1], low[R][0], low[R][1]}, {0, 0, 0, 0}};
#pragma unroll
            for (int h = 0; h < OWN; h++) {
              const u8 *row = page + key_start[R] + (first + h) * key_next[R] + (step * 16 + g) * (2 * WORDS) + 4 * c;
              const u8 *other = row + 16 * WORDS;
#pragma unroll
              for (int k = 0; k < WIDE; k++) {
                u32 x[4] = {*(const u32 *)(row + 32 * k), *(const u32 *)(other + 32 * k),
                            *(const u32 *)(row + 32 * k + 16), *(const u32 *)(other + 32 * k + 16)};
                each<C>([&](auto j) {
                  constexpr int J = decltype(j)::value;
                  u32 a[4];
#pragma unroll
                  for (int i = 0; i < 4; i++) a[i] = subnormal<BITS, J>(x[i]);
                  const u32 *own = queries[h] + all_registers(R) + 2 * k * C + J;
                  multiply(sum[J % 2], a, own[0], own[C]);
                });
              }
              if (narrow_steps(WORDS)) {
                u32 x = *(const u32 *)(row + 32 * WIDE), y = *(const u32 *)(other + 32 * WIDE);
                each<C>([&](auto j) {
                  constexpr int J = decltype(j)::value;
                  multiply(sum[J % 2], subnormal<BITS, J>(x), subnormal<BITS, J>(y),
                           queries[h][all_registers(R) + 2 * WIDE * C + J]);
                });
              }
            }
            const int place = key_scale[R] + head * key_scale_next[R] + (step * 16 + g) * SCALE_ROW;
            const float unit = (float)scale_of_scores * (UNIT * scale_unit(BITS));
            const u32 scales = two_scales(page, place, place + 8 * SCALE_ROW);
            const float one = half_of(scales & 0xFFFF) * unit, two = half_of(scales >> 16) * unit;
            s[step][0] += (sum[0][0] + sum[1][0]) * one, s[step][1] += (sum[0][1] + sum[1][1]) * one;
            s[step][2] += (sum[0][2] + sum[1][2]) * two, s[step][3] += (sum[0][3] + sum[1][3]) * two;
          });
        }
        float peak[2] = {__int_as_float(0xFF800000), __int_as_float(0xFF800000)};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
          if (rows < PAGE) {
            if (step * 16 + g >= rows) s[step][0] = s[step][1] = __int_as_float(0xFF800000);
            if (step * 16 + g + 8 >= rows) s[step][2] = s[step][3] = __int_as_float(0xFF800000);
          }
          peak[0] = fmaxf(peak[0], fmaxf(s[step][0], s[step][2]));
          peak[1] = fmaxf(peak[1], fmaxf(s[step][1], s[step][3]));
        }
        float fade[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          for (int far = 4; far < 32; far *= 2) peak[i] = fmaxf(peak[i], __shfl_xor_sync(~0u, peak[i], far));
          bool raise = peak[i] > top[i] + SLACK || t == work.tile;
          float old = top[i];
          top[i] = raise ? peak[i] : old;
          fade[i] = raise ? exp2_of(old - peak[i]) : 1.0f;
          mass[i] *= fade[i];
        }
        bool any = __any_sync(~0u, fade[0] != 1.0f || fade[1] != 1.0f);
        wait(done + 8 * buffer, turn ^ 1);
        u8 *to = weights + buffer * VALUE_RUNS * WEIGHTS + g * ROW + warp * 16 + c * 4;
        if (g == 0) *(float2 *)(fades + buffer * COLS + warp * 8 + 2 * c) = make_float2(fade[0], fade[1]);
        if (lane == 0) faded[buffer * SCORERS + warp] = any;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
          float p[4];
#pragma unroll
          for (int i = 0; i < 4; i++) p[i] = exp2_of(s[step][i] - top[i % 2]);
          mass[0] += p[0] + p[2], mass[1] += p[1] + p[3];
          const u32 low_rows = pair_of(p[0], p[1]), high_rows = pair_of(p[2], p[3]);
          each<VALUE_RUNS>([&](auto at) {
            constexpr int R = decltype(at)::value;
            const int place = value_scale[R] + (step * 16 + g) * SCALE_ROW;
            u32 scales = two_scales(page, place, place + 8 * SCALE_ROW);
            if (rows < PAGE) {  // what lies beyond may be anything
              scales &= (step * 16 + g < rows ? 0xFFFF : 0) | (step * 16 + g + 8 < rows ? 0xFFFF0000 : 0);
            }
            u8 *own = to + R * WEIGHTS + step * 16 * ROW;
            *(u32 *)own = times(low_rows, __byte_perm(scales, 0, 0x1010));
            *(u32 *)(own + 8 * ROW) = times(high_rows, __byte_perm(scales, 0, 0x3232));
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
      if (g == 0) {
        int column = warp * 8 + 2 * c;
        *(float2 *)(sums + column) = make_float2(top[0], top[1]);
        *(float2 *)(sums + COLS + column) = make_float2(mass[0], mass[1]);
        if (counts[work.item] == 1) {
          float *to = lse + work.b * QUERY_HEADS + work.g * COLS + column;
          to[0] = top[0] + log2f(mass[0]), to[1] = top[1] + log2f(mass[1]);
        } else {
          float *to = part_ml + (u64)(slice + work.item) * 2 * COLS + column;
          to[0] = top[0], to[1] = top[1], to[COLS] = mass[0], to[COLS + 1] = mass[1];
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
    const bool whole = counts[work.item] == 1;
    const int per = 16 / bits;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int j = bits == 8 ? i % 2 : bits == 4 ? i : i + 4 * mine.half;
      const float size = 0.5f * scale_unit(bits) / (1 << (bits * (j % (8 / bits))));
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int word = mine.block * 16 + (bits == 8 && i >= 2 ? 16 : 0) + g + 8 * (k / 2);
        const int number = mine.column + word * per + j;
        if (word >= words) continue;
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
          const int column = n * 8 + 2 * c + k % 2;
          float x = sums_of[i][n][k] * size;
          if (whole) {
            x = __fdividef(x, sums[COLS + column]);
            u32 bits16 = BF16 ? (__float_as_uint(x) + 0x7FFF + ((__float_as_uint(x) >> 16) & 1)) >> 16
                              : pair_of(x, 0.0f) & 0xFFFF;
            out[((u64)work.b * QUERY_HEADS + work.g * COLS + column) * DO + number] = (u16)bits16;
          } else {
            part[((u64)(slice + work.item) * COLS + column) * DV + number] = x;
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) arrive(done + 8 * buffer);
    if (++buffer == 2) buffer = 0, turn ^= 1;
  }
}
