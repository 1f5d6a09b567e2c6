// Matrix products for MLX on a CPU.
//
// MLX's wheel is linked against the reference BLAS. This library precedes it in symbol lookup, so the three products
// MLX calls are answered from here: single precision by the code below, the others by OpenBLAS from the wheel
// `scipy-openblas32` (which prefixes its names).
//
// Single precision is not left to OpenBLAS, because that sums a product of one row, of few rows and of many rows in
// different orders, and again differently when it is cut into pieces. A token's numbers would depend on how many others
// happen to be computed with it. Here every element is summed over k in one order, whatever the shape and the number
// of threads: fused multiply-adds from zero within each run of kRun terms, then the runs one after another. So a
// request gets the same bits alone and in a batch, and from a prompt read in one chunk or several. And products of few
// rows, which is what decoding consists of, cost what reading the weights once costs: each panel of weights is turned
// into columns once and then serves all rows.
//
// Threads are ours: OpenBLAS' wait for each other by spinning, and lose a factor of five or more as soon as another
// process (the prefill worker, say) wants the same cores. Here the columns of the result are cut into pieces which
// whoever has a core takes; nobody waits for a thread that is not running.
//
// OPENBLAS_NUM_THREADS sets the number of threads; the default is one per core this process may use.
// Signatures: CBLAS with 32-bit integers.

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#define GEMM_ARGUMENTS(T) \
  int order, int trans_a, int trans_b, int m, int n, int k, T alpha, const T *a, int lda, const T *b, int ldb, \
      T beta, T *c, int ldc

extern "C" {
void scipy_openblas_set_num_threads(int);
void scipy_cblas_sgemm(GEMM_ARGUMENTS(float));
void scipy_cblas_dgemm(GEMM_ARGUMENTS(double));
void scipy_cblas_cgemm(int, int, int, int, int, int, const void*, const void*, int, const void*, int, const void*,
                       void*, int);
}

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int kRowMajor = 101, kNoTrans = 111;
// Terms that are summed in one run.
constexpr int kRun = 1024;
// Terms that are packed at once: so many that the panel's part stays in the first cache.
constexpr int kPackTerms = 64;
// Below this many multiply-adds waking a thread costs more than it saves.
constexpr int64_t kSmallProduct = 200'000;
constexpr auto kSpin = std::chrono::microseconds(30);

int thread_count() {
  if (const char* wanted = std::getenv("OPENBLAS_NUM_THREADS")) {
    if (const int count = std::atoi(wanted); count > 0) return count;
  }
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

// Threads that take pieces of one job at a time.
class Pool {
 public:
  Pool() {
    scipy_openblas_set_num_threads(1);
    for (int i = 1; i < threads_; ++i) std::thread([this] { serve(); }).detach();
  }

  int threads() const { return threads_; }

  // Calls work(piece) once for each piece in 0..pieces, from any thread, and returns when all calls have.
  void run(int pieces, const std::function<void(int)>& work) {
    std::unique_lock<std::mutex> alone(one_job_, std::try_to_lock);
    if (threads_ == 1 || pieces == 1 || !alone.owns_lock()) {
      for (int piece = 0; piece < pieces; ++piece) work(piece);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(state_);
      work_ = &work;
      pieces_ = pieces;
      next_ = 0;
      open_ = true;
      ++jobs_;
    }
    wake_.notify_all();
    take_pieces();
    std::unique_lock<std::mutex> lock(state_);
    open_ = false;  // a thread that wakes from here on has nothing to do with this job
    left_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void serve() {
    uint64_t seen = 0;
    for (;;) {
      // The next product of a forward pass comes soon: look out for it briefly, then sleep.
      const auto until = std::chrono::steady_clock::now() + kSpin;
      while (jobs_.load(std::memory_order_relaxed) == seen && std::chrono::steady_clock::now() < until) {
      }
      std::unique_lock<std::mutex> lock(state_);
      wake_.wait(lock, [&] { return jobs_ != seen; });
      seen = jobs_;
      if (!open_) continue;
      ++busy_;
      lock.unlock();
      take_pieces();
      lock.lock();
      if (--busy_ == 0) left_.notify_one();
    }
  }

  void take_pieces() {
    for (int piece; (piece = next_.fetch_add(1)) < pieces_;) (*work_)(piece);
  }

  const int threads_ = thread_count();
  std::mutex one_job_, state_;
  std::condition_variable wake_, left_;
  std::atomic<uint64_t> jobs_{0};
  std::atomic<int> next_{0};
  const std::function<void(int)>* work_ = nullptr;
  int pieces_ = 0, busy_ = 0;
  bool open_ = false;
};

// Never destroyed: its threads may outlive static destructors.
Pool& pool() {
  static Pool& pool = *new Pool;
  return pool;
}

// c [m, n] = alpha · a [m, k] · b + beta · c, rows apart by lda, ldb, ldc; b is [n, k] if `transposed`, else [k, n].
struct Product {
  bool transposed;
  int m, n, k;
  float alpha;
  const float* a;
  int lda;
  const float* b;
  int ldb;
  float beta;
  float* c;
  int ldc;
};

typedef float Four __attribute__((vector_size(16)));
typedef int FourInts __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Sixteen __attribute__((vector_size(64)));

// Nothing here is aligned for vectors.
template <class Vector>
INLINE void load(Vector& to, const float* from) {
  std::memcpy(&to, from, sizeof to);
}

template <class Vector>
INLINE void store(float* to, const Vector& from) {
  std::memcpy(to, &from, sizeof from);
}

// Keeps a product from being fused with the sum it goes into: the compiler would do it here and not there.
template <class Vector>
INLINE void round_here(Vector& product) {
  asm("" : "+m"(product));
}

// Four terms of four columns, from b [n, k] to a panel of `width` columns.
INLINE void transpose4(const float* from, int ldb, float* to, int width) {
  Four a, b, c, d;
  load(a, from), load(b, from + ldb), load(c, from + 2 * size_t(ldb)), load(d, from + 3 * size_t(ldb));
  const FourInts low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
  const Four ab = __builtin_shuffle(a, b, low), cd = __builtin_shuffle(c, d, low);
  const Four ef = __builtin_shuffle(a, b, high), gh = __builtin_shuffle(c, d, high);
  store(to, __builtin_shuffle(ab, cd, first));
  store(to + width, __builtin_shuffle(ab, cd, second));
  store(to + 2 * width, __builtin_shuffle(ef, gh, first));
  store(to + 3 * width, __builtin_shuffle(ef, gh, second));
}

// Copies terms first_term… of `columns` columns into a panel [terms, width]; columns that do not exist become zeros.
INLINE void pack(const Product& p, int first_column, int columns, int first_term, int terms, int width, float* panel) {
  if (columns < width) std::memset(panel, 0, size_t(terms) * width * sizeof(float));
  if (!p.transposed) {
    const float* from = p.b + size_t(first_term) * p.ldb + first_column;
    for (int t = 0; t < terms; ++t) std::memcpy(panel + t * width, from + size_t(t) * p.ldb, columns * sizeof(float));
    return;
  }
  const float* from = p.b + size_t(first_column) * p.ldb + first_term;
  const int whole_columns = columns / 4 * 4, whole_terms = terms / 4 * 4;
  for (int block = 0; block < whole_terms; block += kPackTerms) {
    const int block_end = std::min(block + kPackTerms, whole_terms);
    for (int j = 0; j < whole_columns; j += 4) {
      const float* rows = from + size_t(j) * p.ldb;
      for (int t = block; t < block_end; t += 4) transpose4(rows + t, p.ldb, panel + size_t(t) * width + j, width);
    }
  }
  for (int j = 0; j < columns; ++j) {
    for (int t = j < whole_columns ? whole_terms : 0; t < terms; ++t) {
      panel[size_t(t) * width + j] = from[size_t(j) * p.ldb + t];
    }
  }
}

// The running sums of `Rows` rows and two vectors of columns.
template <class Vector, int Rows>
struct Sums {
  static constexpr int lanes = sizeof(Vector) / sizeof(float);
  Vector sum[Rows][2] = {};

  // Adds one term of all rows.
  INLINE void add(const float* panel, const float* a, int lda) {
    Vector left, right;
    load(left, panel), load(right, panel + lanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const float x = a[size_t(r) * lda];
      sum[r][0] += left * x;
      sum[r][1] += right * x;
    }
  }

  // Writes a run that began at first_term, on top of the runs before it.
  INLINE void write(const Product& p, int row, int first_column, int columns, int first_term) const {
    const bool again = first_term > 0;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      float* c = p.c + size_t(row + r) * p.ldc + first_column;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half, c += lanes) {
        const int here = std::min(columns - half * lanes, lanes);
        if (here <= 0) break;
        Vector before = {};
        if (again || p.beta != 0) {
          if (here == lanes) load(before, c);
          else std::memcpy(&before, c, here * sizeof(float));
          if (!again) before *= p.beta, round_here(before);
        }
        Vector result = sum[r][half] * p.alpha;
        round_here(result);
        result += before;
        if (here == lanes) store(c, result);
        else std::memcpy(c, &result, here * sizeof(float));
      }
    }
  }
};

// One run for `Rows` rows and two vectors of columns.
template <class Vector, int Rows>
INLINE void tile(const Product& p, int row, int first_column, int columns, int first_term, int terms,
                 const float* panel, int panel_stride, const float* next, const float* next_end) {
  Sums<Vector, Rows> sums;
  const float* a = p.a + size_t(row) * p.lda + first_term;
  for (int t = 0; t < terms; ++t) {
    if (next < next_end) {
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next + 16, 0, 2);
      next += 32;
    }
    sums.add(panel + size_t(t) * panel_stride, a + t, p.lda);
  }
  sums.write(p, row, first_column, columns, first_term);
}

// Columns first..end for one to four rows: their sums wait while the weights, stored as rows, are packed a little at a
// time, so that what is packed never leaves the first cache. Half the time of packing a whole run first; for eight rows
// and more it is the other way round (measured).
template <class Vector, int Rows>
INLINE void narrow(const Product& p, int first, int end) {
  constexpr int width = 2 * sizeof(Vector) / sizeof(float), line = 64 / sizeof(float);
  alignas(64) float panel[kPackTerms * width];
  for (int column = first; column < end; column += width) {
    const int columns = std::min(width, end - column);
    for (int run = 0; run < p.k; run += kRun) {
      Sums<Vector, Rows> sums;
      const int run_end = std::min(run + kRun, p.k);
      for (int term = run; term < run_end; term += kPackTerms) {
        const int terms = std::min(kPackTerms, run_end - term);
        pack(p, column, columns, term, terms, width, panel);
        // The same terms of the next columns, whose turn comes when these are through.
        const float* next = column + columns + width <= end ? p.b + size_t(column + width) * p.ldb + term : nullptr;
        for (int t = 0; t < terms; ++t) {
          if (next && t % (kPackTerms / width) == 0) {
            const float* row = next + size_t(t / (kPackTerms / width)) * p.ldb;
            for (int ahead = 0; ahead < kPackTerms; ahead += line) __builtin_prefetch(row + ahead, 0, 2);
          }
          sums.add(panel + size_t(t) * width, p.a + term + t, p.lda);
        }
      }
      sums.write(p, 0, column, columns, run);
    }
  }
}

template <class Vector, int Rows>
INLINE void rows_of(int rows, const Product& p, int row, int first_column, int columns, int first_term, int terms,
                    const float* panel, int panel_stride, const float* next, const float* next_end) {
  if (rows == Rows) {
    tile<Vector, Rows>(p, row, first_column, columns, first_term, terms, panel, panel_stride, next, next_end);
  } else if constexpr (Rows > 1) {
    rows_of<Vector, Rows - 1>(rows, p, row, first_column, columns, first_term, terms, panel, panel_stride, next,
                              next_end);
  }
}

// Columns first..end of a product.
template <class Vector, int MaxRows>
INLINE void columns_of(const Product& p, int first, int end) {
  if (p.transposed && p.m == 1) return narrow<Vector, 1>(p, first, end);
  if (p.transposed && p.m == 2) return narrow<Vector, 2>(p, first, end);
  if (p.transposed && p.m == 3) return narrow<Vector, 3>(p, first, end);
  if (p.transposed && p.m == 4) return narrow<Vector, 4>(p, first, end);
  constexpr int width = 2 * sizeof(Vector) / sizeof(float);
  alignas(64) static thread_local float buffer[kRun * width];
  for (int column = first; column < end; column += width) {
    const int columns = std::min(width, end - column);
    for (int term = 0; term < p.k; term += kRun) {
      const int terms = std::min(kRun, p.k - term);
      const float* panel = buffer;
      int stride = width;
      if (!p.transposed && columns == width && p.m <= MaxRows) {
        panel = p.b + size_t(term) * p.ldb + column;
        stride = p.ldb;
      } else {
        pack(p, column, columns, term, terms, width, buffer);
      }
      // What is packed next comes from memory while this is computed.
      const float *next = nullptr, *next_end = nullptr;
      if (p.transposed && p.ldb == p.k && p.k <= kRun && column + width < end) {
        next = p.b + size_t(column + width) * p.ldb;
        next_end = next + size_t(std::min(width, end - column - width)) * p.ldb;
      }
      for (int row = 0; row < p.m; row += MaxRows) {
        rows_of<Vector, MaxRows>(std::min(MaxRows, p.m - row), p, row, column, columns, term, terms, panel, stride,
                                 row == 0 ? next : nullptr, row == 0 ? next_end : nullptr);
      }
    }
  }
}

using Columns = void (*)(const Product&, int first, int end);

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void columns_avx512(const Product& p, int first, int end) {
  columns_of<Sixteen, 12>(p, first, end);
}
__attribute__((target("avx2,fma"))) void columns_avx2(const Product& p, int first, int end) {
  columns_of<Eight, 6>(p, first, end);
}
#endif
void columns_any(const Product& p, int first, int end) { columns_of<Four, 6>(p, first, end); }

struct Kernel {
  Columns columns = columns_any;
  int width = 8;
  Kernel() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) columns = columns_avx512, width = 32;
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) columns = columns_avx2, width = 16;
#endif
  }
};

void multiply(const Product& p) {
  static const Kernel kernel;
  Pool& workers = pool();
  const int wanted = 4 * workers.threads();
  const int width = ((p.n + wanted - 1) / wanted + kernel.width - 1) / kernel.width * kernel.width;
  if (workers.threads() == 1 || p.n <= width || int64_t(p.m) * p.n * p.k < kSmallProduct) {
    kernel.columns(p, 0, p.n);
    return;
  }
  workers.run((p.n + width - 1) / width, [&](int piece) {
    const int first = piece * width;
    kernel.columns(p, first, std::min(p.n, first + width));
  });
}

}  // namespace

extern "C" {

void cblas_sgemm(GEMM_ARGUMENTS(float)) {
  if (order != kRowMajor || m <= 0 || n <= 0 || k <= 0) {
    pool();
    scipy_cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  std::vector<float> rows;
  if (trans_a != kNoTrans) {
    rows.resize(size_t(m) * k);
    for (int t = 0; t < k; ++t) {
      for (int row = 0; row < m; ++row) rows[size_t(row) * k + t] = a[size_t(t) * lda + row];
    }
    a = rows.data();
    lda = k;
  }
  multiply({trans_b != kNoTrans, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc});
}

void cblas_dgemm(GEMM_ARGUMENTS(double)) {
  pool();
  scipy_cblas_dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a,
                 int lda, const void* b, int ldb, const void* beta, void* c, int ldc) {
  pool();
  scipy_cblas_cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
}
