// What a loader hands to Python, made in one piece: a Python class with as many attributes takes longer to fill than a
// small block does to assemble (measured: 0.6 of 1.7 microseconds). Python derives its classes from this one.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dlpack_view.hpp"

namespace prism {

namespace py = pybind11;

struct BlockObject {
  PyObject_HEAD;
  PyObject* tokens;
  PyObject* targets;
  PyObject* rows;  // what knows the rest about the rows of a slot
  unsigned long long index;
  unsigned long long bytes;
  unsigned long long scored_tokens;
  unsigned long long special_tokens;
  unsigned long long documents;
  unsigned long long slot;
};

inline void block_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  auto* const block = reinterpret_cast<BlockObject*>(self);
  Py_XDECREF(block->tokens);
  Py_XDECREF(block->targets);
  Py_XDECREF(block->rows);
  type->tp_free(self);
  Py_DECREF(type);
}

inline py::object block_base_type() {
  static PyMemberDef members[] = {
      {"tokens", T_OBJECT, offsetof(BlockObject, tokens), READONLY, nullptr},
      {"targets", T_OBJECT, offsetof(BlockObject, targets), READONLY, nullptr},
      {"_rows", T_OBJECT, offsetof(BlockObject, rows), READONLY, nullptr},
      {"index", T_ULONGLONG, offsetof(BlockObject, index), READONLY, nullptr},
      {"bytes", T_ULONGLONG, offsetof(BlockObject, bytes), READONLY, nullptr},
      {"scored_tokens", T_ULONGLONG, offsetof(BlockObject, scored_tokens), READONLY, nullptr},
      {"special_tokens", T_ULONGLONG, offsetof(BlockObject, special_tokens), READONLY, nullptr},
      {"documents", T_ULONGLONG, offsetof(BlockObject, documents), READONLY, nullptr},
      {"_slot", T_ULONGLONG, offsetof(BlockObject, slot), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(&block_dealloc)},
      {Py_tp_members, members},
      {0, nullptr},
  };
  static PyType_Spec spec = {"prism_fast._core.BlockBase", sizeof(BlockObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(type);
}

/// Makes the blocks of one loader: instances of `type`, which derives from BlockBase. `rows` becomes their `_rows`.
/// `view(slot, rows, width)` makes the (tokens, targets) of a slot; or, with arrays of [slots, capacity], `view` makes
/// a tensor of each one's DLPack capsule. That takes longer than a small block; shapes come again, so pairs are kept.
/// Neither `view` nor `rows` may lead back to the loader: nothing here takes part in the collection of cycles.
class BlockMaker {
 public:
  BlockMaker(const py::type& type, py::object view, py::object rows, std::size_t slots, py::object tokens,
             py::object targets, std::uint64_t capacity)
      : type_(type),
        view_(std::move(view)),
        rows_(std::move(rows)),
        tokens_(std::move(tokens)),
        targets_(std::move(targets)),
        capacity_(capacity),
        kept_(slots) {}

  struct Counts {
    std::uint64_t index, bytes, scored_tokens, special_tokens, documents;
  };

  py::object make(std::uint64_t slot, std::uint64_t rows, std::uint64_t width, const Counts& counts) {
    const auto& [tokens, targets] = views(slot, rows, width);
    auto* const type = reinterpret_cast<PyTypeObject*>(type_.ptr());
    PyObject* const made = type->tp_alloc(type, 0);
    if (made == nullptr) throw py::error_already_set();
    auto* const block = reinterpret_cast<BlockObject*>(made);
    block->tokens = tokens.inc_ref().ptr();
    block->targets = targets.inc_ref().ptr();
    block->rows = rows_.inc_ref().ptr();
    block->index = counts.index;
    block->bytes = counts.bytes;
    block->scored_tokens = counts.scored_tokens;
    block->special_tokens = counts.special_tokens;
    block->documents = counts.documents;
    block->slot = slot;
    return py::reinterpret_steal<py::object>(made);
  }

 private:
  using Views = std::pair<py::object, py::object>;
  static constexpr std::size_t kMostViews = std::size_t{1} << 13;  // of all slots; some 5 MB of tensors

  const Views& views(std::uint64_t slot, std::uint64_t rows, std::uint64_t width) {
    auto& kept = kept_.at(slot);
    const std::uint64_t key = rows << 32 | width;  // a block holds less than 2^31 tokens
    const auto found = kept.find(key);
    if (found != kept.end()) return found->second;
    const Views made = make_views(slot, rows, width);
    if (kept.size() >= kMostViews / kept_.size() + 1) kept.clear();
    return kept.emplace(key, made).first->second;
  }

  Views make_views(std::uint64_t slot, std::uint64_t rows, std::uint64_t width) const {
    if (tokens_.is_none()) {
      const py::tuple pair = view_(slot, rows, width);
      return {pair[0], pair[1]};
    }
    const auto view = [&](const py::object& array) {
      return view_(dlpack_view(py::reinterpret_borrow<py::array>(array), slot * capacity_, rows, width));
    };
    return {view(tokens_), view(targets_)};
  }

  py::type type_;
  py::object view_;
  py::object rows_;
  py::object tokens_;  // None: `view` knows them
  py::object targets_;
  std::uint64_t capacity_;
  std::vector<std::unordered_map<std::uint64_t, Views>> kept_;
};

}  // namespace prism
