// The number types that weights and pages are stored in.
#pragma once

#include <cstdint>

namespace jaxcb {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct bf16_pair { uint32_t bits; };  // the first one in the lower half

enum class Number { kF32, kBF16, kF16, kS8 };

}  // namespace jaxcb
