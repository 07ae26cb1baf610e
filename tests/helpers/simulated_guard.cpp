// A CUDA device guard for a torch that is built without CUDA: tensors may claim a CUDA device, nothing runs there.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace {

thread_local c10::DeviceIndex current = 0;

struct SimulatedGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, current); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.has_index() ? device.index() : 0;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
  // All operations are over when they return, so there is nothing to wait for.
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

// The autograd engine asks these whether there is an accelerator.
struct SimulatedHooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
};

const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new SimulatedGuard());

}  // namespace

extern "C" int current_device() { return current; }

extern "C" void set_current_device(int device) { current = static_cast<c10::DeviceIndex>(device); }

// torch has made its hooks when this library is loaded, and keeps them. Neither kind has members: they differ in the
// table of functions alone, which is exchanged here. Called twice, it is as before.
extern "C" void exchange_hooks() {
  static SimulatedHooks simulated;
  void* hooks = const_cast<void*>(static_cast<const void*>(&at::detail::getCUDAHooks()));
  void* table;
  std::memcpy(&table, hooks, sizeof table);
  std::memcpy(hooks, static_cast<void*>(&simulated), sizeof table);
  std::memcpy(static_cast<void*>(&simulated), &table, sizeof table);
}
