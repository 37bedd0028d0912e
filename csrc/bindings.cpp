// pybind11 glue only: argument checks, GIL release, buffer ownership. No logic lives here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "version.hpp"

namespace py = pybind11;

namespace {

// ---------------------------------------------------------------------------------------------- losses
void bind_losses(py::module_& m) { (void)m; }

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
