// A window on a numpy array as a DLPack capsule (the interchange structures of https://dmlc.github.io/dlpack, version
// 0.x, which every framework takes): a tensor from it costs what any tensor object costs, less than half of a view that
// torch derives from another tensor.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <memory>

namespace prism {

namespace py = pybind11;

struct DlTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t type_code;
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};
static_assert(sizeof(DlManagedTensor) == 64, "the layout that DLPack fixes on 64-bit machines");

struct DlView {
  DlManagedTensor managed;
  std::int64_t shape[2];
  std::int64_t strides[2];
  PyObject* owner;

  static void destroy(DlManagedTensor* managed) {
    const std::unique_ptr<DlView> view(static_cast<DlView*>(managed->context));
    if (Py_IsInitialized() == 0) return;  // the array is gone, or going, with the interpreter
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(view->owner);
    PyGILState_Release(state);
  }
};

/// [rows, width] from element `start` of a flat int64 or int32 array on. The capsule's reader keeps the array alive.
inline py::object dlpack_view(const py::array& array, std::uint64_t start, std::uint64_t rows, std::uint64_t width) {
  constexpr std::int32_t kCpu = 1;
  constexpr std::uint8_t kInt = 0;
  constexpr const char* kName = "dltensor";
  auto view = std::make_unique<DlView>();
  view->shape[0] = static_cast<std::int64_t>(rows);
  view->shape[1] = static_cast<std::int64_t>(width);
  view->strides[0] = view->shape[1];
  view->strides[1] = 1;
  view->owner = array.ptr();
  const auto item = static_cast<std::uint64_t>(array.itemsize());
  auto* const data = const_cast<std::byte*>(static_cast<const std::byte*>(array.data())) + start * item;
  view->managed = {{data, kCpu, 0, 2, kInt, static_cast<std::uint8_t>(8 * item), 1, view->shape, view->strides, 0},
                   view.get(),
                   &DlView::destroy};
  PyObject* const capsule = PyCapsule_New(&view->managed, kName, [](PyObject* self) {
    if (PyCapsule_IsValid(self, kName) == 0) return;  // its reader has taken the view, and renamed it
    auto* const managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(self, kName));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw py::error_already_set();
  Py_INCREF(view->owner);
  view.release();
  return py::reinterpret_steal<py::object>(capsule);
}

}  // namespace prism
