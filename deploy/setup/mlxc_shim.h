/* Force-included in front of mlx-c's sources.
 *
 * Two gaps are closed here, so that mlx-c can be used as it is published:
 *  - on x86-64 mlx-c leaves out its f16/bf16 accessors for want of a C type; the accessors only hand out bits,
 *    so two-byte integers serve as well;
 *  - standard libraries older than GCC 13's lack <format>; mlx-c uses nothing of it but "{}".
 */
#ifndef PD_BRIDGE_MLXC_SHIM_H
#define PD_BRIDGE_MLXC_SHIM_H

#if !defined(__aarch64__)
#include <stdint.h>
typedef uint16_t float16_t;
typedef uint16_t bfloat16_t;
#define HAS_FLOAT16
#define HAS_BFLOAT16
#endif

#if defined(__cplusplus) && !__has_include(<format>)
#include <sstream>
#include <string>
#include <string_view>

namespace std {
inline void pd_format_to(ostringstream& out, string_view text) {
  out << text;
}

template <typename First, typename... Rest>
void pd_format_to(ostringstream& out, string_view text, const First& first, const Rest&... rest) {
  const size_t hole = text.find("{}");
  out << text.substr(0, hole);
  if (hole != string_view::npos) {
    out << first;
    pd_format_to(out, text.substr(hole + 2), rest...);
  }
}

template <typename... Args>
string format(string_view text, const Args&... args) {
  ostringstream out;
  pd_format_to(out, text, args...);
  return out.str();
}
} // namespace std
#endif

#endif
