// Opens and closes a region whose functions are compiled for a named instruction set.
//
// Open a region after every include and keep std:: templates out of it: an inline function of a shared header
// that is instantiated inside would be the set's code under a shared name, and the linker may pick it for the
// whole program (the reason for having no -m flags either).
#pragma once

// GCC 12's own headers read a variable that they leave unset on purpose, and -Wall says so.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#define PACKED_SDPA_STRINGIFY_(text) #text
#define PACKED_SDPA_PRAGMA_(text) _Pragma(PACKED_SDPA_STRINGIFY_(text))

#if defined(__clang__)
#define PACKED_SDPA_BEGIN_TARGET(features) \
  PACKED_SDPA_PRAGMA_(clang attribute push(__attribute__((target(features))), apply_to = function))
#define PACKED_SDPA_END_TARGET() _Pragma("clang attribute pop")
#else
#define PACKED_SDPA_BEGIN_TARGET(features) \
  _Pragma("GCC push_options") PACKED_SDPA_PRAGMA_(GCC target(features))
#define PACKED_SDPA_END_TARGET() _Pragma("GCC pop_options")
#endif

#define PACKED_SDPA_INLINE inline __attribute__((always_inline))
#define PACKED_SDPA_LAMBDA_INLINE __attribute__((always_inline))

// The phases of a kernel stay functions of their own, so that a profile names them.
#define PACKED_SDPA_PHASE inline __attribute__((noinline))
