// The engine version the compiled core was built as; the Python side refuses a core of another version.
#pragma once

namespace prism {
inline constexpr const char* kVersion = "0.1.0";
}
