// What C++ code of a CPU-only torch asks about CUDA, answered as if there were one device. Streams, events and memory
// are simulated in device.py; the functions here are called by autograd's engine and by operators that ask for the
// current device, and must only be there.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {

struct SimulatedGuard final : public DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  SimulatedGuard() = default;
  explicit SimulatedGuard(DeviceType) {}
  static Device only() { return Device(DeviceType::CUDA, 0); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, only()); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, only()); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, only()); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, only()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard);

}  // namespace c10::impl

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, 0); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
