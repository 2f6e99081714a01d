// Hooks and a device guard for a CUDA device that does not exist: what autograd and fake tensors ask
// of a device while a program is traced. One device, one stream, no work. Load it before torch is
// imported: ATen looks for CUDA hooks once. A CUDA build of torch has hooks and a guard of its own:
// these hooks are preferred to its, and the guard is stored again once torch is imported.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
namespace {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

C10_REGISTER_CLASS_WITH_PRIORITY(
    CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace
}  // namespace at

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return device(); }
  Device exchangeDevice(Device) const override { return device(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
};

}  // namespace

extern "C" void megamoe_store_guard() {
  static OneDevice guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
}

namespace {

const bool registered = [] {
  megamoe_store_guard();
  return true;
}();

}  // namespace
