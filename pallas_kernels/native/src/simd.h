// The vector layer: one register of float32 lanes, and loads that widen stored numbers to it.
//
// load_pairs() takes 16 bfloat16 of which number i and number i + 8 are neighbours: two lie in a word, and widening them
// costs an operation each. Where the CPU multiplies bfloat16 (JAXCB_BF16_PRODUCTS), Pairs are registers of two inputs
// beside each other in every lane, and fma() of them adds two products to a lane at once.
//
// Kernels are written once against these names. A backend for another instruction set is another section of this file.
// AVX2 + FMA + F16C (x86-64-v3), AVX-512 (x86-64-v4), with its bfloat16 or without, and NEON.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#else
#error "the native kernels need AVX2 and FMA (-march=x86-64-v3), AVX-512 (-march=x86-64-v4) or NEON"
#endif

namespace jaxcb {

#if defined(__AVX512F__)
// ---------------------------------------------------------------- AVX-512: 16 lanes, 32 registers

using F32 = __m512;
constexpr int kLanes = 16;
constexpr int kAccumulators = 24;  // a tile of sums that leaves registers for its operands

inline F32 zero() { return _mm512_setzero_ps(); }
inline F32 all(float x) { return _mm512_set1_ps(x); }
inline F32 load(const float* p) { return _mm512_loadu_ps(p); }
inline F32 load(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline F32 load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F32 load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void load_pairs(const bf16* p, F32 (&v)[1]) {
  __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  __m256i low = _mm256_slli_epi32(pairs, 16), high = _mm256_and_si256(pairs, _mm256_set1_epi32(-65536));
  v[0] = _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
inline F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
inline F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }  // b where either is NaN
inline F32 where_less(F32 a, F32 b, F32 yes, F32 no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline F32 round(F32 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F32 power_of_two(F32 whole) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127)), 23));
}
inline void put(bf16* p, F32 a) {
  __m512i bits = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bits));
}
inline void put(f16* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F32 load_part(const float* p, int n) { return _mm512_maskz_loadu_ps((1u << n) - 1, p); }
inline void store_part(float* p, F32 a, int n) { _mm512_mask_storeu_ps(p, (1u << n) - 1, a); }
inline __m256 fold(F32 a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
#define JAXCB_FOLD_TO_256(a) fold(a)

#if defined(__AVX512BF16__)
#define JAXCB_BF16_PRODUCTS
using Pairs = __m512i;
inline Pairs all(bf16_pair x) { return _mm512_set1_epi32(static_cast<int>(x.bits)); }
inline Pairs load_dot(const bf16* p) { return _mm512_loadu_si512(p); }
inline Pairs load_dot_last(const bf16* p) {  // 16 numbers, each beside a zero
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F32 fma(Pairs a, Pairs b, F32 c) {
  return _mm512_dpbf16_ps(c, std::bit_cast<__m512bh>(a), std::bit_cast<__m512bh>(b));
}
inline Pairs no_pairs() { return _mm512_setzero_si512(); }
inline Pairs load(const bf16_pair* p) { return _mm512_loadu_si512(p); }
inline Pairs load_up_to(const bf16* p, int64_t n) {  // zeros after n numbers, nothing past them is touched
  if (n >= 2 * kLanes) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi16((1u << n) - 1, p);
}
inline void store(bf16_pair* p, Pairs a) { _mm512_storeu_si512(p, a); }
inline Pairs pairs_of(const float* p) {  // of 32 numbers, rounded
  return std::bit_cast<Pairs>(_mm512_cvtne2ps_pbh(load(p + kLanes), load(p)));
}
inline F32 keep(uint16_t lanes, F32 a, F32 other) { return _mm512_mask_mov_ps(other, lanes, a); }
// Pairs (a[i], b[i]) of 32 numbers each.
inline void interleave(Pairs a, Pairs b, Pairs (&out)[2]) {
  const Pairs low = _mm512_set_epi32(0x2f000f, 0x2e000e, 0x2d000d, 0x2c000c, 0x2b000b, 0x2a000a, 0x290009, 0x280008,
                                     0x270007, 0x260006, 0x250005, 0x240004, 0x230003, 0x220002, 0x210001, 0x200000);
  out[0] = _mm512_permutex2var_epi16(a, low, b);
  out[1] = _mm512_permutex2var_epi16(a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), b);
}
// Lane i of register j becomes lane j of register i.
inline void transpose(Pairs (&x)[16]) {
  Pairs y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]), x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]), x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // quarters of registers i, i + 4, i + 8, i + 12
    Pairs even = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), odd = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    Pairs later_even = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    Pairs later_odd = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    y[i] = _mm512_shuffle_i32x4(even, later_even, 0x88), y[i + 8] = _mm512_shuffle_i32x4(even, later_even, 0xdd);
    y[i + 4] = _mm512_shuffle_i32x4(odd, later_odd, 0x88), y[i + 12] = _mm512_shuffle_i32x4(odd, later_odd, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) x[i] = y[i];
}
#endif

#elif defined(__AVX2__)
// ---------------------------------------------------------------- AVX2: 8 lanes, 16 registers

using F32 = __m256;
constexpr int kLanes = 8;
constexpr int kAccumulators = 12;

inline F32 zero() { return _mm256_setzero_ps(); }
inline F32 all(float x) { return _mm256_set1_ps(x); }
inline F32 load(const float* p) { return _mm256_loadu_ps(p); }
inline F32 load(const bf16* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F32 load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F32 load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void load_pairs(const bf16* p, F32 (&v)[2]) {
  __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  v[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  v[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}
inline void store(float* p, F32 a) { _mm256_storeu_ps(p, a); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
inline F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
inline F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }  // b where either is NaN
inline F32 min(F32 a, F32 b) { return _mm256_min_ps(a, b); }  // b where either is NaN
inline F32 where_less(F32 a, F32 b, F32 yes, F32 no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline F32 round(F32 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F32 power_of_two(F32 whole) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23));
}
inline void put(bf16* p, F32 a) {
  __m256i bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void put(f16* p, F32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#define JAXCB_FOLD_TO_256(a) (a)

#else
// ---------------------------------------------------------------- NEON: 4 lanes, 32 registers

using F32 = float32x4_t;
constexpr int kLanes = 4;
constexpr int kAccumulators = 24;

inline F32 zero() { return vdupq_n_f32(0); }
inline F32 all(float x) { return vdupq_n_f32(x); }
inline F32 load(const float* p) { return vld1q_f32(p); }
inline F32 load(const bf16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16));
}
inline F32 load(const f16* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
}
inline F32 load(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}
inline void load_pairs(const bf16* p, F32 (&v)[4]) {
  for (int i = 0; i < 2; i++) {
    uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p) + 8 * i));
    v[i] = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
    v[2 + i] = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000)));
  }
}
inline void store(float* p, F32 a) { vst1q_f32(p, a); }
inline F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
inline F32 add(F32 a, F32 b) { return vaddq_f32(a, b); }
inline F32 sub(F32 a, F32 b) { return vsubq_f32(a, b); }
inline F32 mul(F32 a, F32 b) { return vmulq_f32(a, b); }
inline F32 div(F32 a, F32 b) { return vdivq_f32(a, b); }
inline F32 max(F32 a, F32 b) { return vmaxq_f32(a, b); }  // NaN where either is NaN
inline F32 min(F32 a, F32 b) { return vminq_f32(a, b); }
inline F32 where_less(F32 a, F32 b, F32 yes, F32 no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
inline F32 round(F32 a) { return vrndnq_f32(a); }
inline F32 power_of_two(F32 whole) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127)), 23));
}
inline void put(bf16* p, F32 a) {
  uint32x4_t bits = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  bits = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  vst1_u16(reinterpret_cast<uint16_t*>(p), vmovn_u32(vbslq_u32(vceqq_f32(a, a), bits, vdupq_n_u32(0x7fc0))));
}
inline void put(f16* p, F32 a) {
  vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(a)));
}
#endif

// Sums over the lanes of four registers. Each sum adds its lanes in one order wherever it stands among the four, so
// that a result doesn't depend on what was computed beside it.
inline void sum4(F32 a, F32 b, F32 c, F32 d, float* out) {
#if defined(__AVX2__)
  __m256 ab, cd, all4;
  {
    __m256 p = JAXCB_FOLD_TO_256(a), q = JAXCB_FOLD_TO_256(b);
    ab = _mm256_add_ps(_mm256_unpacklo_ps(p, q), _mm256_unpackhi_ps(p, q));
  }
  {
    __m256 p = JAXCB_FOLD_TO_256(c), q = JAXCB_FOLD_TO_256(d);
    cd = _mm256_add_ps(_mm256_unpacklo_ps(p, q), _mm256_unpackhi_ps(p, q));
  }
  all4 = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all4), _mm256_extractf128_ps(all4, 1)));
#else
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
#endif
}

inline float sum(F32 a) {
  float out[4];
  sum4(a, zero(), zero(), zero(), out);
  return out[0];
}

inline float largest(F32 a) {
  float lanes[kLanes];
  store(lanes, a);
  float most = lanes[0];
  for (int i = 1; i < kLanes; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

// Brings the bytes of a row into the cache. The processor runs ahead of loads in order, and drops requests that it has no
// room for: so many of them come sooner than by prefetching.
template <class T>
inline void touch(const T* row, int64_t size) {
  const volatile char* begin = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < size * static_cast<int64_t>(sizeof(T)); i += 64) begin[i];
}

// The first n < kLanes numbers at p, zeros after them; nothing past them is touched.
template <class T>
inline F32 load_part(const T* p, int n) {
  T lanes[kLanes] = {};
  memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}

#if !defined(__AVX512F__)
inline void store_part(float* p, F32 a, int n) {
  float lanes[kLanes];
  store(lanes, a);
  memcpy(p, lanes, n * sizeof(float));
}
#endif

// As many of kLanes numbers as there are.
inline F32 load_up_to(const float* p, int64_t n) { return n >= kLanes ? load(p) : load_part(p, static_cast<int>(n)); }
inline void store_up_to(float* p, F32 a, int64_t n) {
  if (n >= kLanes) store(p, a);
  else store_part(p, a, static_cast<int>(n));
}

// e^x within 2 units in the last place from -87 to 88, the value at the end beyond. NaN stays NaN.
// Range reduction and polynomial of Cephes' expf (Moshier).
inline F32 exp(F32 x) {
  x = min(all(88.3762626647949f), max(all(-87.3365478515625f), x));
  F32 n = round(mul(x, all(1.44269504088896341f)));
  F32 r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  F32 p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), all(1.0f));
  return mul(p, power_of_two(n));
}

// tanh within 2e-7 of the true value relative to it: Cephes' tanhf (Moshier), a polynomial near 0 and e^x elsewhere.
inline F32 tanh(F32 x) {
  F32 z = mul(x, x);
  F32 p = all(-5.70498872745e-3f);
  p = fma(p, z, all(2.06390887954e-2f));
  p = fma(p, z, all(-5.37397155531e-2f));
  p = fma(p, z, all(1.33314422036e-1f));
  p = fma(p, z, all(-3.33332819422e-1f));
  F32 near = fma(mul(p, z), x, x);
  F32 far = sub(all(1.0f), div(all(2.0f), add(exp(add(x, x)), all(1.0f))));
  return where_less(z, all(0.625f * 0.625f), near, far);
}

// Rounding to the nearest, ties to even, for what is written into pages; put() of a register gives the same bits.
inline void put(float* p, float x) { *p = x; }
inline void put(float* p, F32 a) { store(p, a); }
inline void put(bf16* p, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  p->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void put(f16* p, float x) {
#if defined(__F16C__)
  p->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  float16_t half = static_cast<float16_t>(x);
  memcpy(&p->bits, &half, 2);
#endif
}
inline bf16_pair pair_of(float x, float y) {
  bf16 low, high;
  put(&low, x);
  put(&high, y);
  return {static_cast<uint32_t>(high.bits) << 16 | low.bits};
}

}  // namespace jaxcb
