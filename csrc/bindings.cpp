// pybind11 glue only: argument checks, GIL release, buffer ownership. No logic lives here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "batch_assembler.hpp"
#include "bits_per_byte.hpp"
#include "block_object.hpp"
#include "bucket_plan.hpp"
#include "checksum.hpp"
#include "cross_entropy.hpp"
#include "few_tokens.hpp"
#include "foreign.hpp"
#include "parallel.hpp"
#include "random.hpp"
#include "shard.hpp"
#include "token_stream.hpp"
#include "transpose.hpp"
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
      "copy_matrix",
      [](const prism::Matrix& from, const prism::Matrix& to, int threads) {
        const py::gil_scoped_release release;
        prism::copy_matrix(from, to, threads);
      },
      py::arg("from"), py::arg("to"), py::arg("threads"));
  m.attr("FEW_TOKENS") = prism::kFewTokens;
  m.def(
      "few_tokens_logits",
      [](const prism::Matrix& hidden, const prism::Matrix& head, Address bias, const prism::Matrix& out, int threads) {
        const py::gil_scoped_release release;
        prism::few_tokens_logits(hidden, head, pointer<const float>(bias), out, threads);
      },
      py::arg("hidden"), py::arg("head"), py::arg("bias"), py::arg("out"), py::arg("threads"));
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
template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
std::span<const T> as_span(const Array<T>& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

/// A read-only array over memory that `owner` keeps alive.
template <typename T>
py::array view_of(std::span<const T> data, const py::object& owner) {
  py::array_t<T> array(static_cast<py::ssize_t>(data.size()), data.data(), owner);
  array.attr("flags").attr("writeable") = false;
  return array;
}

py::array tokens_of(const std::shared_ptr<prism::Shard>& shard, prism::RecordRange range) {
  std::vector<std::byte> scratch;
  std::span<const std::byte> data;
  {
    const py::gil_scoped_release release;
    data = shard->token_bytes(range.start, range.length, scratch);
  }
  const py::object owner = py::cast(shard);
  return prism::with_token_type(shard->token_width(), data, [&](const auto* ids) -> py::array {
    using Id = std::remove_cv_t<std::remove_pointer_t<decltype(ids)>>;
    const std::span<const Id> tokens(ids, static_cast<std::size_t>(range.length));
    if (shard->mapped()) return view_of(tokens, owner);
    py::array_t<Id> copy(static_cast<py::ssize_t>(tokens.size()));
    std::copy(tokens.begin(), tokens.end(), copy.mutable_data());
    copy.attr("flags").attr("writeable") = false;
    return copy;
  });
}

prism::Access access_named(const std::string& name) {
  if (name == "auto") return prism::Access::automatic;
  if (name == "map") return prism::Access::map;
  if (name == "pread") return prism::Access::pread;
  throw py::value_error("access '" + name + "': expected 'auto', 'map' or 'pread'");
}

/// DataFault -> prism_fast.protocol.errors.DataError, FileError -> OSError of the errno (FileNotFoundError, ...).
void translate_data_errors(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const prism::DataFault& fault) {
    try {
      const py::object type = py::module_::import("prism_fast.protocol.errors").attr("DataError");
      PyErr_SetString(type.ptr(), fault.what());
    } catch (py::error_already_set& broken) {
      broken.restore();
    }
  } catch (const prism::FileError& fault) {
    errno = fault.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, fault.path().c_str());
  }
}

void bind_shards(py::module_& m) {
  using prism::Shard;
  using prism::ShardWriter;
  using prism::TokenTable;
  py::register_exception_translator(&translate_data_errors);

  m.def(
      "xxh64",
      [](const py::buffer& data) {
        const py::buffer_info info = data.request();
        return prism::xxh64(
            {static_cast<const std::byte*>(info.ptr), static_cast<std::size_t>(info.size * info.itemsize)});
      },
      py::arg("data"), "XXH64 (seed 0) of a contiguous buffer.");

  py::class_<TokenTable, std::shared_ptr<TokenTable>>(m, "TokenTable",
                                                      "The bytes each token id stands for; see tokenizers.py.")
      .def(py::init([](const Array<std::uint64_t>& offsets, const Array<std::uint8_t>& bytes) {
             const auto raw = std::as_bytes(as_span(bytes));
             const auto bounds = as_span(offsets);
             return std::make_shared<TokenTable>(std::vector<std::uint64_t>(bounds.begin(), bounds.end()),
                                                 std::vector<std::byte>(raw.begin(), raw.end()));
           }),
           py::arg("offsets").noconvert(), py::arg("bytes").noconvert())
      .def(
          "count",
          [](const TokenTable& table, const Array<std::uint32_t>& tokens, const Array<std::uint64_t>& lengths) {
            const auto ids = as_span(tokens);
            const auto sizes = as_span(lengths);
            Array<std::uint64_t> out(static_cast<py::ssize_t>(sizes.size()));
            const std::span<std::uint64_t> bytes(out.mutable_data(), sizes.size());
            {
              const py::gil_scoped_release release;
              table.count(ids, sizes, bytes);
            }
            return out;
          },
          py::arg("tokens").noconvert(), py::arg("lengths").noconvert(),
          "UTF-8 bytes of each record: uint64 [records]. `tokens` uint32 holds the records end to end.")
      .def(
          "decode",
          [](const TokenTable& table, const Array<std::uint32_t>& tokens) {
            const std::string out = table.decode(as_span(tokens));
            return py::bytes(out);
          },
          py::arg("tokens").noconvert(), "The bytes that `tokens` (uint32) stand for.");

  py::class_<Shard, std::shared_ptr<Shard>>(m, "Shard")
      .def_static(
          "open",
          [](const std::string& path, const std::string& format, unsigned width,
             std::optional<std::uint64_t> end_of_text, bool one_record, const std::string& access) {
            const prism::OpenOptions options{format, width, end_of_text, one_record, access_named(access)};
            const py::gil_scoped_release release;
            return prism::open_shard(path, options);
          },
          py::arg("path"), py::kw_only(), py::arg("format") = "", py::arg("width") = 0,
          py::arg("end_of_text") = py::none(), py::arg("one_record") = false, py::arg("access") = "auto")
      .def_property_readonly("path", &Shard::path)
      .def_property_readonly("format", &Shard::format)
      .def_property_readonly("mapped", &Shard::mapped)
      .def_property_readonly("token_width", &Shard::token_width)
      .def_property_readonly("records", &Shard::records)
      .def_property_readonly("tokens", &Shard::tokens)
      .def_property_readonly("stored_tokens", &Shard::stored_tokens)
      .def_property_readonly("file_bytes", &Shard::file_bytes)
      .def_property_readonly("knows_utf8_bytes", &Shard::knows_utf8_bytes)
      .def_property_readonly("utf8_bytes_total", &Shard::utf8_bytes_total)
      .def_property_readonly("tokenizer_name", [](const Shard& s) { return s.tokenizer().name; })
      .def_property_readonly("tokenizer_fingerprint",
                             [](const Shard& s) {
                               const auto& f = s.tokenizer().fingerprint;
                               return py::bytes(reinterpret_cast<const char*>(f.data()), f.size());
                             })
      .def_property_readonly("n_vocab", [](const Shard& s) { return s.tokenizer().n_vocab; })
      .def_property_readonly("end_of_text",
                             [](const Shard& s) -> py::object {
                               const std::uint32_t id = s.tokenizer().end_of_text;
                               return id == prism::kNoId ? py::object(py::none()) : py::cast(id);
                             })
      .def_property_readonly("offsets",
                             [](const std::shared_ptr<Shard>& s) { return view_of(s->offsets(), py::cast(s)); })
      .def_property_readonly("utf8_bytes",
                             [](const std::shared_ptr<Shard>& s) { return view_of(s->utf8_bytes(), py::cast(s)); })
      .def_property_readonly("doc_ids",
                             [](const Shard& s) {
                               const auto ids = s.doc_ids();
                               return Array<std::uint64_t>(static_cast<py::ssize_t>(ids.size()), ids.data());
                             })
      .def(
          "record", [](const std::shared_ptr<Shard>& s, std::uint64_t i) { return tokens_of(s, s->range(i)); },
          py::arg("i"))
      .def("all_tokens", [](const std::shared_ptr<Shard>& s) { return tokens_of(s, {0, s->stored_tokens()}); })
      .def("count_utf8_bytes", &Shard::count_utf8_bytes, py::arg("table"), py::call_guard<py::gil_scoped_release>())
      .def(
          "verify", [](const Shard& s, const std::shared_ptr<TokenTable>& table) { s.verify(table.get()); },
          py::arg("table").none(true), py::call_guard<py::gil_scoped_release>())
      .def("seal", [](const Shard& s) {
        const auto seal = s.seal();
        return py::bytes(reinterpret_cast<const char*>(seal.data()), seal.size());
      });

  py::class_<ShardWriter>(m, "ShardWriter")
      .def(py::init([](const std::string& path, const std::string& name, const std::string& fingerprint,
                       std::uint32_t n_vocab, std::optional<std::uint32_t> end_of_text) {
             prism::TokenizerStamp stamp;
             stamp.name = name;
             if (fingerprint.size() != stamp.fingerprint.size()) {
               throw py::value_error("tokenizer fingerprint: expected 32 bytes, found " +
                                     std::to_string(fingerprint.size()));
             }
             std::copy(fingerprint.begin(), fingerprint.end(), stamp.fingerprint.begin());
             stamp.n_vocab = n_vocab;
             stamp.end_of_text = end_of_text.value_or(prism::kNoId);
             return std::make_unique<ShardWriter>(path, stamp);
           }),
           py::arg("path"), py::arg("tokenizer"), py::arg("fingerprint"), py::arg("n_vocab"), py::arg("end_of_text"))
      .def(
          "add",
          [](ShardWriter& w, const Array<std::uint32_t>& tokens, const Array<std::uint64_t>& lengths,
             const Array<std::uint64_t>& utf8_bytes, const Array<std::uint64_t>& doc_ids) {
            const py::gil_scoped_release release;
            w.add(as_span(tokens), as_span(lengths), as_span(utf8_bytes), as_span(doc_ids));
          },
          py::arg("tokens").noconvert(), py::arg("lengths").noconvert(), py::arg("utf8_bytes").noconvert(),
          py::arg("doc_ids").noconvert())
      .def("finish", &ShardWriter::finish, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("records", &ShardWriter::records)
      .def_property_readonly("tokens", &ShardWriter::tokens)
      .def_property_readonly("utf8_bytes", &ShardWriter::utf8_bytes_total);
}

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

// A numpy array that takes over the memory of a result: 10^8 records are not copied.
template <class T>
py::array_t<T> owning_array(prism::LargeArray<T> values) {
  auto owner = std::make_unique<prism::LargeArray<T>>(std::move(values));
  prism::LargeArray<T>* const held = owner.get();
  py::capsule keep(owner.release(), [](void* pointer) { delete static_cast<prism::LargeArray<T>*>(pointer); });
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

py::dict plan_statistics(const py::array& lengths, const Array<std::int64_t>& records,
                         const Array<std::int64_t>& starts, std::uint64_t micro_batch, std::uint64_t accumulate,
                         const Array<std::int32_t>& sources, std::uint64_t source_count) {
  const prism::Lengths view = lengths_view(lengths);
  const prism::Order order{as_span(records), as_span(starts), micro_batch};
  const std::span<const std::int32_t> source_view = as_span(sources);
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

template <class T>
std::span<T> writable(py::array_t<T, py::array::c_style>& array) {
  return {array.mutable_data(), static_cast<std::size_t>(array.size())};  // raises if the array is read-only
}

/// A loader with the arrays that it reads and writes, which must outlive its threads, and what makes its blocks.
template <class Loader>
struct Bound {
  std::vector<py::array> keep;
  std::unique_ptr<Loader, typename Loader::Deleter> loader;
  std::shared_ptr<prism::BlockMaker> maker;
  const char* name;
  std::uint64_t next_step;

  void close() {
    const py::gil_scoped_release release;
    loader.reset();
  }
  Loader& open() const {
    if (!loader) throw std::runtime_error("this " + std::string(name) + " is closed");
    return *loader;
  }
  /// The next of what the loader reads, waited for without the GIL. StopIteration at the end.
  template <class Item>
  Item take() {
    Loader& from = open();
    Item item;
    for (;;) {
      typename Loader::Wait wait;
      {
        const py::gil_scoped_release release;
        wait = from.next(item, 200);
      }
      if (wait == Loader::Wait::finished) throw py::stop_iteration();
      if (wait == Loader::Wait::ready) break;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();  // Ctrl-C while a disk hangs
    }
    ++next_step;
    return item;
  }
};
using BoundAssembler = Bound<prism::BatchAssembler>;
using BoundStream = Bound<prism::TokenStream>;

template <class Token>
std::unique_ptr<BoundAssembler> make_assembler(
    const std::vector<std::shared_ptr<prism::Shard>>& shards, const std::shared_ptr<prism::TokenTable>& table,
    const Array<std::int64_t>& row_record, const Array<std::int64_t>& row_start, const Array<std::int64_t>& row_length,
    const Array<std::int64_t>& rows, const Array<std::int64_t>& starts, std::uint64_t micro_batch, Array<Token> tokens,
    Array<Token> targets, Array<std::int64_t> lengths, Array<std::int32_t> cu_lengths, Array<std::int64_t> bytes,
    std::uint64_t capacity, std::uint64_t max_rows, std::uint64_t rank, std::uint64_t world, std::uint64_t prefetch,
    std::uint64_t threads, std::uint64_t start_step, std::int64_t end_of_text,
    const std::shared_ptr<prism::BlockMaker>& maker) {
  const prism::RowTable row_table{as_span(row_record), as_span(row_start), as_span(row_length)};
  const prism::RowOrder order{as_span(rows), as_span(starts), micro_batch};
  const prism::BlockBuffers buffers{prism::TokenBuffers<Token>{writable(tokens), writable(targets)},
                                    writable(lengths),
                                    writable(cu_lengths),
                                    writable(bytes),
                                    capacity,
                                    max_rows};
  const prism::BatchAssembler::Config config{rank, world, prefetch, threads, start_step, end_of_text};
  auto bound = std::make_unique<BoundAssembler>(
      BoundAssembler{{row_record, row_start, row_length, rows, starts, tokens, targets, lengths, cu_lengths, bytes},
                     nullptr,
                     maker,
                     "TokenLoader",
                     start_step});
  const py::gil_scoped_release release;
  bound->loader.reset(
      new prism::BatchAssembler({shards.begin(), shards.end()}, table, row_table, order, buffers, config));
  return bound;
}

template <class Token>
void bind_assembler_of(py::class_<BoundAssembler>& type) {
  type.def(py::init(&make_assembler<Token>), py::arg("shards"), py::arg("table"), py::kw_only(), py::arg("row_record"),
           py::arg("row_start"), py::arg("row_length"), py::arg("rows"), py::arg("starts"), py::arg("micro_batch"),
           py::arg("tokens").noconvert(), py::arg("targets").noconvert(), py::arg("lengths").noconvert(),
           py::arg("cu_lengths").noconvert(), py::arg("bytes").noconvert(), py::arg("capacity"), py::arg("max_rows"),
           py::arg("rank"), py::arg("world"), py::arg("prefetch"), py::arg("threads"), py::arg("start_step"),
           py::arg("end_of_text"), py::arg("maker"));
}

void bind_batch_assembler(py::module_& m) {
  using prism::BatchAssembler;
  py::class_<BoundAssembler> type(m, "BatchAssembler", "See prism_fast/data/loader.py.");
  bind_assembler_of<std::int64_t>(type);
  bind_assembler_of<std::int32_t>(type);
  type.def_static("slots", &BatchAssembler::slots, py::arg("prefetch"))
      .def(
          "next",
          [](BoundAssembler& self) {
            const auto block = self.take<prism::Block>();
            return self.maker->make(block.slot, block.rows, block.width,
                                    {block.micro_batch, block.bytes, block.targets, 0, 0});
          },
          "The next block, made by `maker`; StopIteration at the end.")
      .def_readonly("next_step", &BoundAssembler::next_step)
      .def("close", &BoundAssembler::close);
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
template <class Token>
std::unique_ptr<BoundStream> make_stream(const std::vector<std::shared_ptr<prism::Shard>>& shards,
                                         const std::shared_ptr<prism::TokenTable>& table, std::uint64_t seq_len,
                                         std::uint64_t batch_size, std::uint64_t rank, std::uint64_t world,
                                         std::uint64_t prefetch, std::uint64_t start_batch, bool byte_basis,
                                         std::int64_t end_of_text, Array<Token> tokens, Array<Token> targets,
                                         const std::shared_ptr<prism::BlockMaker>& maker) {
  prism::TokenStream::Config config;
  config.seq_len = seq_len;
  config.batch_size = batch_size;
  config.rank = rank;
  config.world = world;
  config.prefetch = prefetch;
  config.start_batch = start_batch;
  config.basis = byte_basis ? prism::Basis::bytes : prism::Basis::tokens;
  config.end_of_text = end_of_text;
  const prism::TokenBuffers<Token> buffers{writable(tokens), writable(targets)};
  auto bound =
      std::make_unique<BoundStream>(BoundStream{{tokens, targets}, nullptr, maker, "TokenStream", start_batch});
  const py::gil_scoped_release release;
  bound->loader.reset(new prism::TokenStream(prism::Shards(shards.begin(), shards.end()), table, config, buffers));
  return bound;
}

template <class Token>
void bind_stream_of(py::class_<BoundStream>& type) {
  type.def(py::init(&make_stream<Token>), py::arg("shards"), py::arg("table"), py::kw_only(), py::arg("seq_len"),
           py::arg("batch_size"), py::arg("rank"), py::arg("world"), py::arg("prefetch"), py::arg("start_batch"),
           py::arg("byte_basis"), py::arg("end_of_text"), py::arg("tokens").noconvert(), py::arg("targets").noconvert(),
           py::arg("maker"));
}

void bind_loaders(py::module_& m) {
  m.attr("BlockBase") = prism::block_base_type();
  py::class_<prism::BlockMaker, std::shared_ptr<prism::BlockMaker>>(m, "BlockMaker", "See csrc/block_object.hpp.")
      .def(py::init<const py::type&, py::object, py::object, std::size_t, py::object, py::object, std::uint64_t>(),
           py::arg("type"), py::arg("view"), py::arg("rows"), py::arg("slots"), py::arg("tokens") = py::none(),
           py::arg("targets") = py::none(), py::arg("capacity") = 0);
  bind_batch_assembler(m);

  using prism::StreamPlan;
  using prism::TokenStream;

  py::class_<StreamPlan>(m, "StreamPlan")
      .def_readonly("rows", &StreamPlan::rows)
      .def_readonly("batches", &StreamPlan::batches)
      .def_readonly("documents", &StreamPlan::documents)
      .def_readonly("covered_documents", &StreamPlan::covered_documents)
      .def_readonly("covered_bytes", &StreamPlan::covered_bytes)
      .def_readonly("covered_tokens", &StreamPlan::covered_tokens)
      .def_readonly("special_tokens", &StreamPlan::special_tokens)
      .def_readonly("tail_bytes", &StreamPlan::tail_bytes)
      .def_readonly("tail_tokens", &StreamPlan::tail_tokens);

  py::class_<BoundStream> type(m, "TokenStream", "See prism_fast/data/stream.py.");
  bind_stream_of<std::int64_t>(type);
  bind_stream_of<std::int32_t>(type);
  type.def_static("slots", &TokenStream::slots, py::arg("prefetch"))
      .def_property_readonly("plan", [](const BoundStream& self) { return self.open().plan(); })
      .def_property_readonly("batches", [](const BoundStream& self) { return self.open().batches(); })
      .def(
          "next",
          [](BoundStream& self) {
            const auto batch = self.take<prism::StreamBatch>();
            return self.maker->make(
                batch.slot, batch.rows, batch.width,
                {batch.index, batch.counts.bytes, batch.counts.scored, batch.counts.special, batch.documents});
          },
          "The next batch, made by `maker`; StopIteration at the end.")
      .def_readonly("next_step", &BoundStream::next_step)
      .def("close", &BoundStream::close);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "prism_fast compiled core: losses, shards, planner, loaders.";
  m.attr("__version__") = prism::kVersion;
  bind_losses(m);
  bind_shards(m);
  bind_planner(m);
  bind_loaders(m);
}
