// Common part of the one-pass decode kernel: constants, and functions for tensor cores, codes and
// scales. The kernel computes decode attention over entries whose values all KV heads share, with
// keys and values in segments of 8, 4 and 2 bits. Hopper only: whole pages arrive by bulk copies.
//
// Words as in ops/decode/__init__.py: entry (`row`), page, tile, item, split (`slice`), segment
// (`run`), code word. Here a tile is a page, an item of work is (sequence, group), an item of
// values (`Item`) 64 numbers of every entry; words have 16 bits.
//
// One block runs per multiprocessor. SCORERS warps compute scores of pages, each for SETS times
// four query heads, and leave softmax weights in shared memory. The other warps sum values with
// these weights: one or two value items each, for all query heads. One of their threads copies
// pages ahead. Weights are multiplied by the scales of values in the latter warps
// (WEIGHERS_SCALE), or in the former if values are a single segment.
//
// Scores of stored keys are integer products: a query is 16-bit integers, split into two bytes, so
// that codes are multiplied as they are; the two bytes of four query heads are the eight columns of
// a product. Codes of values become fp16, minus the middle code. Of 16 rows of a product, rows i
// and i + 8 are adjacent: k = 2 i and 2 i + 1.
//
// Constants that build.py defines before this text:
//   PAGE entries per page, PAGE_BYTES copied per page, STAGES pages in shared memory at a time
//   G groups of HEADS KV heads; REAL query heads per KV head, N with padding; QUERY_HEADS of all
//   groups, without padding
//   ITEMS of values for WEIGHERS warps; WARPS per block; BUFFERS of weights; WEIGHERS_SCALE
//   KEY_*: per segment of keys its bits, words per entry, byte of its first entry, number of its
//   first scale, and the distances to the same of the next head
//   VALUE_SCALE: number of the first scale of values; SCALE bytes per scale, SCALE_ROW scales per
//   entry; DQ, DO, DV: width of q, out and part; BF16: whether q and out are bf16

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

constexpr int COLS = HEADS * N;            // query heads per group, with padding
constexpr int SCORERS = COLS / (4 * SETS);
// The query head of a column in its group; padding columns repeat the last query head.
__device__ __forceinline__ bool is_real(int column) { return column % N < REAL; }
__device__ __forceinline__ int real_of(int column) {
  return column / N * REAL + (is_real(column) ? column % N : REAL - 1);
}
constexpr int WARP_HEADS = 8 / N;          // KV heads per scoring warp
constexpr int STEPS = PAGE / 16;
constexpr int ROW = 2 * PAGE + 16;         // bytes of a query head's weights for a page
constexpr int WEIGHTS = COLS * ROW;        // bytes of all weights for a page
#define NONE_YET __int_as_float(0xFF800000)  // -inf: no score yet
constexpr float SLACK = 4.0f;              // how far a score exceeds the maximum before it is raised
constexpr int MOST_QUERY = 32512;          // largest query integer: both of its bytes fit into int8

// A value item, 64 numbers of every entry: block, its first word / 16 in the segment; half, with 2
// bits which bytes of the words; column, the segment's first column of the output. Then the
// segment's bits, words per entry, byte of the first entry and number of the first scale.
struct __align__(16) Item { int block, half, column, bits, words, start, scale, unused; };

__device__ constexpr int key_bits[] = KEY_BITS, key_words[] = KEY_WORDS, key_start[] = KEY_START;
__device__ constexpr int key_next[] = KEY_NEXT, key_scale[] = KEY_SCALE;
__device__ constexpr int key_scale_next[] = KEY_SCALE_NEXT;
constexpr int KEY_RUNS = sizeof(key_bits) / sizeof(int);
__device__ constexpr int numbers(int runs) {
  return runs == 0 ? 0 : numbers(runs - 1) + key_words[runs - 1] * (16 / key_bits[runs - 1]);
}

// Of a segment of keys: 32-bit words of an entry that a thread loads, how many of them by one load,
// and registers of queries, one for every code position in a byte (field). A product takes two.
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
// Byte of an entry where a thread's load begins.
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
// Integer products of unsigned codes and bytes of queries: 32 or 16 numbers, added to 0 or to c.
__device__ __forceinline__ void start(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
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
__device__ __forceinline__ void multiply(
    float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
      " {%10,%11,%12,%13};" : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1),
        "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
__device__ __forceinline__ void load(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_turned(u32 (&x)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
// Sum of both bytes' products. Intermediate overflow is harmless: the result fits.
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
// Stores of two or four adjacent numbers.
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
// Scales of two entries as fp16, smaller than the true scales by the factor scale_unit.
__device__ constexpr float scale_unit(int bits) { return SCALE == 2 ? 1.0f : 1.0f / (1 << bits); }
__device__ __forceinline__ u32 two_scales(const u8 *page, int at, int other) {
  if (SCALE == 2) return ((const u16 *)page)[at] | (u32)((const u16 *)page)[other] << 16;
  u32 x;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h; }"
      : "=r"(x) : "r"(page[at] | (u32)page[other] << 8));
  return x;
}
// A scale of keys, smaller than the true scale by the factor KEY_UNIT: the bits of an fp8 number
// moved into a float are the number times a power of two, also for subnormal numbers.
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

// Code J of two words minus the middle code, as fp16, 2 * factor times too large.
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
template <int END, class F> __device__ __forceinline__ void unrolled(F f) { Loop<0, END, F>::run(f); }
