// AVX-512 on a CPU that has none, for tests: SIMDe computes each intrinsic (Debian: libsimde-dev). Included before all
// else, with -march=x86-64-v3 and -DJAXCB_EMULATED=<1 for AVX-512, 2 for its bfloat16 too>.
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

// What SIMDe 0.7.4 doesn't have, by halves.
template <class To, class Half>
inline To emulated_of(Half low, Half high) {
  To out;
  std::memcpy(&out, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&out) + sizeof low, &high, sizeof high);
  return out;
}
template <class Half, class From>
inline Half emulated_half(From a, int which) {
  Half out;
  std::memcpy(&out, reinterpret_cast<const char*>(&a) + which * sizeof out, sizeof out);
  return out;
}
#define EMULATED(name, from, half, to, one)                                                               \
  inline to emulated_##name(from a) {                                                                     \
    return emulated_of<to>(one(emulated_half<half>(a, 0)), one(emulated_half<half>(a, 1)));               \
  }
EMULATED(cvtepu16_epi32, __m256i, __m128i, simde__m512i, _mm256_cvtepu16_epi32)
EMULATED(cvtph_ps, __m256i, __m128i, simde__m512, _mm256_cvtph_ps)
EMULATED(cvtepi32_ps, simde__m512i, __m256i, simde__m512, _mm256_cvtepi32_ps)
EMULATED(cvtps_epi32, simde__m512, __m256, simde__m512i, _mm256_cvtps_epi32)
inline simde__m512i emulated_cvtepi8_epi32(__m128i a) {
  return emulated_of<simde__m512i>(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_extractf32x8_ps(a, which) emulated_half<__m256>(a, which)

// Of the numbers that a mask leaves out none is touched.
inline simde__m512 emulated_maskz_loadu_ps(uint16_t lanes, const void* from) {
  simde__m512 out{};
  for (int i = 0; i < 16; i++) {
    if (lanes >> i & 1) std::memcpy(reinterpret_cast<char*>(&out) + 4 * i, static_cast<const char*>(from) + 4 * i, 4);
  }
  return out;
}
inline void emulated_mask_storeu_ps(void* to, uint16_t lanes, simde__m512 a) {
  for (int i = 0; i < 16; i++) {
    if (lanes >> i & 1) std::memcpy(static_cast<char*>(to) + 4 * i, reinterpret_cast<const char*>(&a) + 4 * i, 4);
  }
}
inline simde__m512i emulated_maskz_loadu_epi16(uint32_t lanes, const void* from) {
  simde__m512i out{};
  for (int i = 0; i < 32; i++) {
    if (lanes >> i & 1) std::memcpy(reinterpret_cast<char*>(&out) + 2 * i, static_cast<const char*>(from) + 2 * i, 2);
  }
  return out;
}
inline __m256i emulated_cvtepi32_epi16(simde__m512i a) {
  __m256i out;
  for (int i = 0; i < 16; i++) std::memcpy(reinterpret_cast<char*>(&out) + 2 * i, reinterpret_cast<char*>(&a) + 4 * i, 2);
  return out;
}
inline simde__m512i emulated_cvtne2ps_pbh(simde__m512 high, simde__m512 low) {
  simde__m512i out;
  for (int i = 0; i < 32; i++) {
    uint32_t bits;
    std::memcpy(&bits, reinterpret_cast<const char*>(i < 16 ? &low : &high) + 4 * (i % 16), 4);
    bool number = (bits & 0x7fffffff) <= 0x7f800000;
    uint16_t rounded = number ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : (bits >> 16 | 0x40);
    std::memcpy(reinterpret_cast<char*>(&out) + 2 * i, &rounded, 2);
  }
  return out;
}
inline __m256i emulated_cvtps_ph(simde__m512 a) {
  __m128i low = _mm256_cvtps_ph(emulated_half<__m256>(a, 0), _MM_FROUND_TO_NEAREST_INT);
  return emulated_of<__m256i>(low, _mm256_cvtps_ph(emulated_half<__m256>(a, 1), _MM_FROUND_TO_NEAREST_INT));
}
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(a, rounding) emulated_cvtps_ph(a)
#define _mm512_maskz_loadu_epi16 emulated_maskz_loadu_epi16
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtne2ps_pbh emulated_cvtne2ps_pbh
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps

#define __AVX512F__ 1
#if JAXCB_EMULATED == 2
#define __AVX512BF16__ 1
#endif
