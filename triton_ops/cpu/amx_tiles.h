// The tiles of a processor that multiplies matrices of bfloat16 (Intel's AMX): whether this process may use them, and
// the few instructions for them.
//
// There are eight registers. Each holds a tile of 16 rows of 64 bytes: 16 x 32 bfloat16, or 16 x 16 float32.
#pragma once

#include <atomic>
#include <cstdint>

#include <c10/util/BFloat16.h>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define NANOSERVE_TILES 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nanoserve {

constexpr int64_t kTileSide = 16;                         // rows of a tile, and columns of a tile of sums
constexpr int64_t kTileDepth = 32;                        // columns of a tile of bfloat16
constexpr int64_t kTileNumbers = kTileSide * kTileDepth;  // bfloat16 of a tile
constexpr int64_t kTileSums = kTileSide * kTileSide;      // float32 of a tile
constexpr int64_t kTileRowBytes = 64;

// Whether tiles may be used where the processor has them. Tests forbid it, to see the ways of other processors.
inline std::atomic<bool> tiles_allowed{true};

#if defined(NANOSERVE_TILES)

// Whether the processor has tiles, the system saves them when it switches threads, and it lets this process use them.
// An instruction for tiles kills the process (SIGILL) where one of the three is missing. The system may refuse although
// the processor has them: for one, if a thread handles signals on a stack that is too small for their content.
inline bool find_tiles() {
  constexpr unsigned kSystemSavesState = 1u << 27;               // leaf 1, ECX: OSXSAVE
  constexpr unsigned kTiles = 1u << 22 | 1u << 24 | 1u << 25;    // leaf 7, EDX: of bfloat16, as such, of bytes
  constexpr unsigned kSavedTiles = 3u << 17;                     // XCR0: the tiles' shapes and their content
  constexpr long kRequestPermission = 0x1023, kTileContent = 18;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & kSystemSavesState)) return false;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kTiles) != kTiles) return false;
  if ((static_cast<unsigned>(_xgetbv(0)) & kSavedTiles) != kSavedTiles) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileContent) == 0;
}

// The answer is kept: a permission lasts as long as the process.
inline bool has_tiles() {
  static const bool found = find_tiles();
  return found && tiles_allowed;
}

// What each register holds: a tile of 16 rows of 64 bytes, unless it is told to hold a smaller one.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// While one lives, its thread's registers hold tiles of these shapes. Without one, the system has less to save.
class TileRegisters {
 public:
  explicit TileRegisters(const TileShapes& shapes = TileShapes()) {
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~TileRegisters() { asm volatile("tilerelease" ::: "memory"); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// Registers are numbered in the instructions themselves. (GCC's own _tile_loadd takes no template's number, and does not
// tell the compiler that memory is read.)

// Rows lie `row_bytes` apart.
template <int Register>
inline void load_tile(const void* source, int64_t row_bytes = kTileRowBytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(source), "r"(row_bytes), "i"(Register) : "memory");
}

template <int Register>
inline void store_tile(void* target, int64_t row_bytes = kTileRowBytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(target), "r"(row_bytes), "i"(Register) : "memory");
}

template <int Register>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Register));
}

// Sums[m][n] += Left[m][k] * Right[k / 2][n][k % 2] over 32 columns k: right tiles hold pairs of rows, interleaved.
template <int Sums, int Left, int Right>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
}

// The same with signed bytes, which are summed as int32: Left[m][k] * Right[k / 4][n][k % 4].
template <int Sums, int Left, int Right>
inline void multiply_byte_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
}

#else

inline bool has_tiles() { return false; }

#endif

}  // namespace nanoserve
