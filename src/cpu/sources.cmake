# The CPU kernels, free of torch: part of the library, and built alone for the sanitizers.
set(PACKED_SDPA_CPU_KERNEL_SOURCES
  src/cpu/documents.cpp
  src/cpu/huge_pages.cpp
  src/cpu/isa.cpp
  src/cpu/kernels.cpp
  src/cpu/padding.cpp
  src/cpu/scalar/kernels.cpp
  src/cpu/scratch.cpp
  src/cpu/tiled.cpp
  src/cpu/work_items.cpp
)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND PACKED_SDPA_CPU_KERNEL_SOURCES
    src/cpu/x86/amx.cpp
    src/cpu/x86/avx2.cpp
    src/cpu/x86/avx512.cpp
    src/cpu/x86/avx512_bf16.cpp
  )
endif()
