# packed_sdpa_torch: the libtorch of an installed torch wheel (or of a libtorch archive) as one imported target.
#
# find_package(Torch) of a CUDA wheel fails where there is no CUDA toolkit, and nothing here needs one.
# PACKED_SDPA_TORCH_DIR: the folder that holds include/ and lib/; asked from the Python interpreter when not given.
include_guard(GLOBAL)

if(NOT PACKED_SDPA_TORCH_DIR)
  if(NOT Python_EXECUTABLE)
    find_package(Python COMPONENTS Interpreter REQUIRED)
  endif()
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE _torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT _torch_dir)
    message(FATAL_ERROR "packed_sdpa: ${Python_EXECUTABLE} has no torch. Install one (2.11 to 2.14), or give "
      "-DPACKED_SDPA_TORCH_DIR=FOLDER with libtorch's include/ and lib/.")
  endif()
  set(PACKED_SDPA_TORCH_DIR "${_torch_dir}" CACHE PATH "Folder with libtorch's include/ and lib/")
endif()
set(PACKED_SDPA_TORCH_LIBRARY_DIR "${PACKED_SDPA_TORCH_DIR}/lib")
foreach(_file include/ATen/ATen.h lib/libtorch_cpu.so lib/libc10.so lib/libtorch.so)
  if(NOT EXISTS "${PACKED_SDPA_TORCH_DIR}/${_file}")
    message(FATAL_ERROR "packed_sdpa: ${PACKED_SDPA_TORCH_DIR} has no ${_file}; PACKED_SDPA_TORCH_DIR must be a "
      "libtorch folder.")
  endif()
endforeach()

if(NOT TARGET packed_sdpa_torch)
  find_package(Threads REQUIRED)
  add_library(packed_sdpa_torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(packed_sdpa_torch SYSTEM INTERFACE
    "${PACKED_SDPA_TORCH_DIR}/include" "${PACKED_SDPA_TORCH_DIR}/include/torch/csrc/api/include")
  target_link_directories(packed_sdpa_torch INTERFACE "${PACKED_SDPA_TORCH_LIBRARY_DIR}")
  target_link_libraries(packed_sdpa_torch INTERFACE
    "${PACKED_SDPA_TORCH_LIBRARY_DIR}/libtorch.so"
    "${PACKED_SDPA_TORCH_LIBRARY_DIR}/libtorch_cpu.so"
    "${PACKED_SDPA_TORCH_LIBRARY_DIR}/libc10.so"
    Threads::Threads)
endif()
