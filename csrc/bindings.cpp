// pybind11 glue only: argument checks, GIL release, buffer ownership. No logic lives here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <bit>
#include <cstdint>

#include "bits_per_byte.hpp"
#include "cross_entropy.hpp"
#include "parallel.hpp"
#include "version.hpp"

namespace py = pybind11;

namespace {

// ---------------------------------------------------------------------------------------------- losses
// Tensors arrive as data pointers (0: absent) with their layout; prism_fast/kernels/backends/cpp.py has checked dtypes,
// devices and shapes.

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

prism::Matrix matrix(std::uintptr_t data, int dtype, std::array<std::int64_t, 2> shape,
                     std::array<std::int64_t, 2> strides) {
  if (dtype < 0 || dtype > 3) throw py::value_error("dtype code must be 0 (f32), 1 (bf16), 2 (f16) or 3 (f64)");
  if (shape[0] < 0 || shape[1] < 0) throw py::value_error("a matrix cannot have a negative size");
  return {pointer<void>(data), static_cast<prism::Dtype>(dtype), shape[0], shape[1], strides[0], strides[1]};
}

prism::Targets targets(std::uintptr_t data, bool is_int64, std::int64_t ignore_index) {
  return {pointer<const void>(data), is_int64, ignore_index};
}

void bind_losses(py::module_& m) {
  using Address = std::uintptr_t;
  py::class_<prism::Matrix>(m, "Matrix")
      .def(py::init(&matrix), py::arg("data"), py::arg("dtype"), py::arg("shape"), py::arg("strides"));
  py::class_<prism::Targets>(m, "Targets")
      .def(py::init(&targets), py::arg("data"), py::arg("is_int64"), py::arg("ignore_index"));
  py::class_<prism::LossOptions>(m, "LossOptions")
      .def(py::init([](double label_smoothing, double z_loss, double softcap, Address class_weight) {
             return prism::LossOptions{label_smoothing, z_loss, softcap, pointer<const void>(class_weight)};
           }),
           py::arg("label_smoothing"), py::arg("z_loss"), py::arg("softcap"), py::arg("class_weight"));

  m.def("cross_entropy_isa", &prism::cross_entropy_isa, "The instruction set that the loss loops run on.");
  m.def("parallel_runtime", &prism::parallel_runtime, "What the loss loops share their threads with.");
  m.def(
      "token_nll",
      [](const prism::Matrix& logits, const prism::Targets& target, Address nll, Address lse, Address correct,
         Address entropy, Address faults, int threads) {
        const prism::ScoreOut out{pointer<void>(nll), pointer<void>(lse), pointer<bool>(correct),
                                  pointer<void>(entropy), pointer<std::int32_t>(faults)};
        const py::gil_scoped_release release;
        prism::token_nll(logits, target, out, threads);
      },
      py::arg("logits"), py::arg("target"), py::arg("nll"), py::arg("lse"), py::arg("correct"), py::arg("entropy"),
      py::arg("faults"), py::arg("threads"));
  m.def(
      "token_nll_shard",
      [](const prism::Matrix& logits, const prism::Targets& target, std::int64_t vocab_start, Address max, Address sum,
         Address target_logit, int threads) {
        const py::gil_scoped_release release;
        prism::token_nll_shard(logits, target, vocab_start, pointer<void>(max), pointer<void>(sum),
                               pointer<void>(target_logit), threads);
      },
      py::arg("logits"), py::arg("target"), py::arg("vocab_start"), py::arg("max"), py::arg("sum"),
      py::arg("target_logit"), py::arg("threads"));
  static_assert(sizeof(prism::RowTerms) == 6 * sizeof(double), "a row's terms are one line of a float64 tensor");
  m.attr("EMPTY_ROW_TERMS") = std::bit_cast<std::array<double, 6>>(prism::RowTerms{});
  m.def(
      "add_terms",
      [](const prism::Matrix& logits, const prism::Targets& target, std::int64_t vocab_start,
         const prism::LossOptions& options, bool moment, Address terms, int threads) {
        const py::gil_scoped_release release;
        prism::add_terms(logits, target, vocab_start, options, moment, pointer<prism::RowTerms>(terms), threads);
      },
      py::arg("logits"), py::arg("target"), py::arg("vocab_start"), py::arg("options"), py::arg("moment"),
      py::arg("terms"), py::arg("threads"));
  m.def(
      "score_of_terms",
      [](Address terms, const prism::Targets& target, std::int64_t rows, std::int64_t vocab, int dtype, Address nll,
         Address lse, Address correct, Address entropy, Address faults) {
        const prism::ScoreOut out{pointer<void>(nll), pointer<void>(lse), pointer<bool>(correct),
                                  pointer<void>(entropy), pointer<std::int32_t>(faults)};
        const py::gil_scoped_release release;
        prism::score_of_terms(pointer<const prism::RowTerms>(terms), target, rows, vocab,
                              static_cast<prism::Dtype>(dtype), out);
      },
      py::arg("terms"), py::arg("target"), py::arg("rows"), py::arg("vocab"), py::arg("dtype"), py::arg("nll"),
      py::arg("lse"), py::arg("correct"), py::arg("entropy"), py::arg("faults"));
  m.def(
      "loss_of_terms",
      [](Address terms, const prism::Targets& target, std::int64_t rows, std::int64_t vocab, int dtype,
         const prism::LossOptions& options, Address loss, Address lse, Address faults) {
        const prism::LossOut out{pointer<void>(loss), pointer<double>(lse), pointer<std::int32_t>(faults)};
        const py::gil_scoped_release release;
        return prism::loss_of_terms(pointer<const prism::RowTerms>(terms), target, rows, vocab,
                                    static_cast<prism::Dtype>(dtype), options, out);
      },
      py::arg("terms"), py::arg("target"), py::arg("rows"), py::arg("vocab"), py::arg("dtype"), py::arg("options"),
      py::arg("loss"), py::arg("lse"), py::arg("faults"));
  m.def(
      "cross_entropy",
      [](const prism::Matrix& logits, const prism::Targets& target, const prism::LossOptions& options, Address loss,
         Address lse, Address faults, const prism::Matrix* grad, Address grad_loss, std::int64_t grad_loss_stride,
         int threads) {
        const prism::LossOut out{pointer<void>(loss), pointer<double>(lse), pointer<std::int32_t>(faults)};
        const py::gil_scoped_release release;
        return prism::cross_entropy(logits, target, options, out, grad, pointer<const void>(grad_loss),
                                    grad_loss_stride, threads);
      },
      py::arg("logits"), py::arg("target"), py::arg("options"), py::arg("loss"), py::arg("lse"), py::arg("faults"),
      py::arg("grad"), py::arg("grad_loss"), py::arg("grad_loss_stride"), py::arg("threads"));
  m.def(
      "cross_entropy_backward",
      [](const prism::Matrix& logits, const prism::Targets& target, const prism::LossOptions& options, Address lse,
         const prism::Matrix& grad, Address grad_loss, std::int64_t grad_loss_stride, int threads) {
        const py::gil_scoped_release release;
        prism::cross_entropy_backward(logits, target, options, pointer<const double>(lse), grad,
                                      pointer<const void>(grad_loss), grad_loss_stride, threads);
      },
      py::arg("logits"), py::arg("target"), py::arg("options"), py::arg("lse"), py::arg("grad"), py::arg("grad_loss"),
      py::arg("grad_loss_stride"), py::arg("threads"));
  m.def(
      "scale_rows",
      [](const prism::Matrix& rows, Address factor, std::int64_t factor_stride, int threads) {
        const py::gil_scoped_release release;
        prism::scale_rows(rows, pointer<const void>(factor), factor_stride, threads);
      },
      py::arg("rows"), py::arg("factor"), py::arg("factor_stride"), py::arg("threads"));
  m.def(
      "sum_rows",
      [](Address values, bool is_double, std::int64_t count, Address out) {
        const double total = prism::sum_rows(pointer<const void>(values), is_double, count);
        if (is_double) {
          *pointer<double>(out) = total;
        } else {
          *pointer<float>(out) = static_cast<float>(total);
        }
      },
      py::arg("values"), py::arg("is_double"), py::arg("count"), py::arg("out"));
  m.def(
      "batch_code_length",
      [](Address nll, const prism::Targets& target, std::int64_t rows, std::int64_t row_tokens, Address token_bytes,
         std::int64_t vocab, double fault_nats, Address out) {
        prism::CodeLength total;
        {
          const py::gil_scoped_release release;
          for (std::int64_t row = 0; row < rows; ++row) {
            prism::add_row(total, pointer<const float>(nll), target, row * row_tokens, row_tokens,
                           pointer<const std::int32_t>(token_bytes), vocab, fault_nats);
          }
        }
        double* sums = pointer<double>(out);
        sums[0] = total.nats;
        sums[1] = total.special_nll_nats;
        sums[2] = static_cast<double>(total.bytes);
        sums[3] = static_cast<double>(total.tokens);
        sums[4] = static_cast<double>(total.special_tokens);
        sums[5] = static_cast<double>(total.faults);
      },
      py::arg("nll"), py::arg("target"), py::arg("rows"), py::arg("row_tokens"), py::arg("token_bytes"),
      py::arg("vocab"), py::arg("fault_nats"), py::arg("out"));
}

// ---------------------------------------------------------------------------------------------- shards
void bind_shards(py::module_& m) { (void)m; }

// --------------------------------------------------------------------------------------------- planner
void bind_planner(py::module_& m) { (void)m; }

// --------------------------------------------------------------------------------------------- loaders
void bind_loaders(py::module_& m) { (void)m; }

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "prism_fast compiled core: losses, shards, planner, loaders.";
  m.attr("__version__") = prism::kVersion;
  bind_losses(m);
  bind_shards(m);
  bind_planner(m);
  bind_loaders(m);
}
