// SPDX-License-Identifier: Apache-2.0
// Functions between DS_BEGIN_TARGET("names") and DS_END_TARGET are compiled for these instruction sets, whatever the flags
// of the compiler say. They must not run on a processor that has them not.
#pragma once

#if defined(__clang__)
#define DS_PRAGMA(text) _Pragma(#text)
#define DS_BEGIN_TARGET(names) DS_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define DS_END_TARGET _Pragma("clang attribute pop")
#else
#define DS_PRAGMA(text) _Pragma(#text)
#define DS_BEGIN_TARGET(names) _Pragma("GCC push_options") DS_PRAGMA(GCC target(names))
#define DS_END_TARGET _Pragma("GCC pop_options")
#endif
