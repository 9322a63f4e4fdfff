#include "cuda/capability.h"

#include <dlfcn.h>

namespace packed_sdpa {

namespace {

// Of cuda.h, whose numbers never change: CUresult cuDeviceGet(CUdevice*, int) and cuDeviceGetAttribute(int*,
// CUdevice_attribute, CUdevice). Ordinals are torch's, because the driver obeys CUDA_VISIBLE_DEVICES too.
using DeviceGet = int (*)(int* device, int ordinal);
using DeviceGetAttribute = int (*)(int* value, int attribute, int device);
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;

}  // namespace

int compute_capability(const c10::Device& device) {
  if (!device.is_cuda()) return 0;
  // Loaded already where torch has a CUDA tensor; never loaded by us.
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) return 0;
  const auto device_get = reinterpret_cast<DeviceGet>(dlsym(driver, "cuDeviceGet"));
  const auto get_attribute = reinterpret_cast<DeviceGetAttribute>(dlsym(driver, "cuDeviceGetAttribute"));
  int capability = 0;
  int handle = 0;
  int major = 0;
  int minor = 0;
  const int ordinal = device.has_index() ? device.index() : 0;
  if (device_get != nullptr && get_attribute != nullptr && device_get(&handle, ordinal) == 0 &&
      get_attribute(&major, kComputeCapabilityMajor, handle) == 0 &&
      get_attribute(&minor, kComputeCapabilityMinor, handle) == 0) {
    capability = 10 * major + minor;
  }
  dlclose(driver);  // takes back our reference only
  return capability;
}

}  // namespace packed_sdpa
