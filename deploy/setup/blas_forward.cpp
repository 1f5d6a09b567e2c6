// Matrix products for MLX on a CPU.
//
// MLX's wheel is linked against the reference BLAS. This library precedes it in symbol lookup, so the three products
// MLX calls are answered from here, by OpenBLAS from the wheel `scipy-openblas32` (which prefixes its names).
//
// - A product with one row on the left (every projection of a decode step) goes to the matrix-vector routine, which
//   reads the weights 2 to 4 times faster.
// - Threads are ours, not OpenBLAS': its threads wait for each other by spinning, and lose a factor of five or more
//   as soon as another process (the prefill worker, say) wants the same cores. Here the columns of the result are
//   cut into pieces which whoever has a core takes; nobody waits for a thread that is not running.
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

#define GEMM_ARGUMENTS(T) \
  int order, int trans_a, int trans_b, int m, int n, int k, T alpha, const T *a, int lda, const T *b, int ldb, \
      T beta, T *c, int ldc
#define GEMV_ARGUMENTS(T) \
  int order, int trans, int m, int n, T alpha, const T *a, int lda, const T *x, int incx, T beta, T *y, int incy

extern "C" {
void scipy_openblas_set_num_threads(int);
void scipy_cblas_sgemm(GEMM_ARGUMENTS(float));
void scipy_cblas_dgemm(GEMM_ARGUMENTS(double));
void scipy_cblas_sgemv(GEMV_ARGUMENTS(float));
void scipy_cblas_dgemv(GEMV_ARGUMENTS(double));
void scipy_cblas_cgemm(int, int, int, int, int, int, const void*, const void*, int, const void*, int, const void*,
                       void*, int);
}

namespace {

constexpr int kRowMajor = 101, kNoTrans = 111, kTrans = 112;
// Below this many multiply-adds waking a thread costs more than it saves.
constexpr int64_t kSmallProduct = 200'000;
constexpr int kMinColumns = 64;
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

template <typename T>
struct Blas;
template <>
struct Blas<float> {
  static constexpr auto gemm = scipy_cblas_sgemm;
  static constexpr auto gemv = scipy_cblas_sgemv;
};
template <>
struct Blas<double> {
  static constexpr auto gemm = scipy_cblas_dgemm;
  static constexpr auto gemv = scipy_cblas_dgemv;
};

// One piece: n columns of a row-major product.
template <typename T>
void columns(GEMM_ARGUMENTS(T)) {
  if (m != 1) {
    Blas<T>::gemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  const int step = trans_a == kNoTrans ? 1 : lda;
  // The routine may scale the old result by a zero beta, and 0 · NaN must not survive.
  if (beta == 0) std::memset(c, 0, size_t(n) * sizeof(T));
  if (trans_b == kNoTrans) {
    Blas<T>::gemv(order, kTrans, k, n, alpha, b, ldb, a, step, beta, c, 1);
  } else {
    Blas<T>::gemv(order, kNoTrans, n, k, alpha, b, ldb, a, step, beta, c, 1);
  }
}

template <typename T>
void product(GEMM_ARGUMENTS(T)) {
  Pool& workers = pool();
  const int wanted = 4 * workers.threads();
  const int width = std::max(kMinColumns, ((n + wanted - 1) / wanted + 15) / 16 * 16);
  if (order != kRowMajor) {
    Blas<T>::gemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  } else if (workers.threads() == 1 || n <= width || int64_t(m) * n * k < kSmallProduct) {
    columns<T>(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  } else {
    workers.run((n + width - 1) / width, [&](int piece) {
      const int first = piece * width;
      const T* from = b + (trans_b == kNoTrans ? size_t(first) : size_t(first) * size_t(ldb));
      columns<T>(order, trans_a, trans_b, m, std::min(width, n - first), k, alpha, a, lda, from, ldb, beta,
                 c + first, ldc);
    });
  }
}

}  // namespace

extern "C" {

void cblas_sgemm(GEMM_ARGUMENTS(float)) {
  product<float>(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(GEMM_ARGUMENTS(double)) {
  product<double>(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a,
                 int lda, const void* b, int ldb, const void* beta, void* c, int ldc) {
  scipy_cblas_cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
}
