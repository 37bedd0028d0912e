// pybind11 glue only: argument checks, GIL release, buffer ownership. No logic lives here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bucket_plan.hpp"
#include "random.hpp"
#include "version.hpp"

namespace py = pybind11;

namespace {

// ---------------------------------------------------------------------------------------------- losses
void bind_losses(py::module_& m) { (void)m; }

// ---------------------------------------------------------------------------------------------- shards
void bind_shards(py::module_& m) { (void)m; }

// --------------------------------------------------------------------------------------------- planner
template <class T>
std::span<const T> items(const py::array& array) {
  return {static_cast<const T*>(array.data()), static_cast<std::size_t>(array.size())};
}

prism::Lengths lengths_view(const py::array& lengths) {
  if (lengths.ndim() == 1 && (lengths.flags() & py::array::c_style)) {
    if (py::isinstance<py::array_t<std::uint16_t>>(lengths)) return items<std::uint16_t>(lengths);
    if (py::isinstance<py::array_t<std::int32_t>>(lengths)) return items<std::int32_t>(lengths);
    if (py::isinstance<py::array_t<std::uint32_t>>(lengths)) return items<std::uint32_t>(lengths);
    if (py::isinstance<py::array_t<std::int64_t>>(lengths)) return items<std::int64_t>(lengths);
  }
  throw py::type_error("lengths must be a contiguous [records] array of uint16, int32, uint32 or int64");
}

// A numpy array that owns a vector's memory: results of 10^8 records are not copied.
template <class T>
py::array_t<T> owning_array(std::vector<T> values) {
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  std::vector<T>* const held = owner.get();
  py::capsule keep(owner.release(), [](void* pointer) { delete static_cast<std::vector<T>*>(pointer); });
  return py::array_t<T>(static_cast<py::ssize_t>(held->size()), held->data(), keep);
}

py::array_t<std::int64_t> bucket_plan_fixed(const py::array& lengths, std::uint64_t micro_batch, std::uint64_t bucket,
                                            std::uint64_t seed) {
  const prism::Lengths view = lengths_view(lengths);
  if (micro_batch == 0) throw py::value_error("micro_batch must be at least 1 record");
  const std::uint64_t count = (prism::record_count(view) + micro_batch - 1) / micro_batch;
  py::array_t<std::int64_t> rows({static_cast<py::ssize_t>(count), static_cast<py::ssize_t>(micro_batch)});
  const std::span<std::int64_t> out(rows.mutable_data(), static_cast<std::size_t>(rows.size()));
  py::gil_scoped_release release;
  prism::plan_fixed(view, micro_batch, bucket, seed, out);
  return rows;
}

py::tuple bucket_plan_variable(const py::array& lengths, std::uint64_t max_rows, std::uint64_t token_budget,
                               std::uint64_t row_overhead, std::uint64_t bucket, bool exact_width, std::uint64_t seed) {
  const prism::Lengths view = lengths_view(lengths);
  prism::VariablePlan plan;
  {
    py::gil_scoped_release release;
    plan = prism::plan_variable(view, {max_rows, token_budget, row_overhead, bucket, exact_width}, seed);
  }
  return py::make_tuple(owning_array(std::move(plan.records)), owning_array(std::move(plan.starts)));
}

using ContiguousInt64 = py::array_t<std::int64_t, py::array::c_style>;
using ContiguousInt32 = py::array_t<std::int32_t, py::array::c_style>;

py::dict plan_statistics(const py::array& lengths, const ContiguousInt64& records, const ContiguousInt64& starts,
                         std::uint64_t micro_batch, std::uint64_t accumulate, const ContiguousInt32& sources,
                         std::uint64_t source_count) {
  const prism::Lengths view = lengths_view(lengths);
  const prism::Order order{items<std::int64_t>(records), items<std::int64_t>(starts), micro_batch};
  const std::span<const std::int32_t> source_view = items<std::int32_t>(sources);
  prism::PlanStatistics s;
  {
    py::gil_scoped_release release;
    s = prism::measure_plan(view, order, accumulate, source_view, source_count);
  }
  py::dict out;
  out["micro_batches"] = s.micro_batches;
  out["real_tokens"] = s.real_tokens;
  out["padded_tokens"] = s.padded_tokens;
  out["mean_width"] = s.mean_width;
  out["mean_square_width"] = s.mean_square_width;
  out["mean_rows_width"] = s.mean_rows_width;
  out["mean_rows_square_width"] = s.mean_rows_square_width;
  out["width_p50"] = s.width_p50;
  out["width_p90"] = s.width_p90;
  out["width_p99"] = s.width_p99;
  out["zero_pad_micro_batches"] = s.zero_pad_micro_batches;
  out["adjacent_correlation"] = s.adjacent_correlation;
  out["windows"] = s.windows;
  out["sources_total"] = s.sources_total;
  out["sources_min"] = s.sources_min;
  return out;
}

void bind_planner(py::module_& m) {
  m.def("bucket_plan_fixed", &bucket_plan_fixed, py::arg("lengths"), py::arg("micro_batch"), py::arg("bucket"),
        py::arg("seed"), "int64 [M, micro_batch] record numbers, -1 in the one incomplete row; bucket 0: file order.");
  m.def("bucket_plan_variable", &bucket_plan_variable, py::arg("lengths"), py::arg("max_rows"), py::arg("token_budget"),
        py::arg("row_overhead"), py::arg("bucket"), py::arg("exact_width"), py::arg("seed"),
        "(records int64 [N], starts int64 [M + 1]): micro-batch k is records[starts[k]:starts[k + 1]].");
  m.def("plan_statistics", &plan_statistics, py::arg("lengths"), py::arg("records"), py::arg("starts"),
        py::arg("micro_batch"), py::arg("accumulate"), py::arg("sources"), py::arg("source_count"),
        "Sums over an order; empty records: file order; empty starts: micro_batch records each.");

  py::class_<prism::SplitMix64>(m, "SplitMix64", "The pinned generator of docs/bucket-plan.md.")
      .def(py::init<std::uint64_t>(), py::arg("seed"))
      .def("next", &prism::SplitMix64::next)
      .def(
          "below",
          [](prism::SplitMix64& self, std::uint64_t bound) {
            if (bound == 0) throw py::value_error("bound must be at least 1");
            return self.below(bound);
          },
          py::arg("bound"))
      .def(
          "shuffle",
          [](prism::SplitMix64& self, py::array_t<std::int64_t, py::array::c_style>& values) {
            std::int64_t* const first = values.mutable_data();  // raises if the array is read-only
            prism::shuffle(std::span(first, static_cast<std::size_t>(values.size())), self);
          },
          py::arg("values").noconvert(), "Shuffles a contiguous int64 array in place.");
}

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
