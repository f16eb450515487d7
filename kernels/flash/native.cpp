// The autograd node of flash attention, and the launches of its kernels, without Python.
//
// kernels/flash/native.py builds and feeds this module. Python runs a call first: Triton then has
// compiled its kernels, and their parameters lie ready (kernels/launching/driver.py). Copies of those
// make a plan here, for one device, one dtype, one layout of q, k and v and one kind of options, and a
// later call writes nothing into them but addresses and scales. Nothing here knows what a kernel does.
//
// Whatever is not as it was when the plan was made is left to Python: `attend` gives None, and a
// backward pass calls the Python function that `connect` was given.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Functions of CUDA's driver and of torch's CUDA library, which torch's CPU build does not have.
struct Driver {
  int (*launch)(const void* config, void* function, void** parameters, void** extra) = nullptr;
  int (*replace_address)(void* map, void* address) = nullptr;
  int (*get_context)(void** context) = nullptr;
  int (*set_context)(void* context) = nullptr;
  int (*current_stream)(int device, void** stream) = nullptr;
};

Driver driver;
PyObject* backward_in_python = nullptr;

constexpr uint64_t kAlignment = 16;
constexpr size_t kMaxPlans = 1024;
// Layouts of do that one plan knows.
constexpr size_t kMaxBackwards = 16;

// Which tensor a parameter is the address of; the workspace's parts follow.
enum Slot { kQ, kK, kV, kO, kLse, kRest, kDo, kDq, kDk, kDv, kNumTensors };
constexpr size_t kMaxSlots = 16;
using Addresses = std::array<uint64_t, kMaxSlots>;

uint64_t address_of(const Tensor& x) {
  return reinterpret_cast<uint64_t>(x.const_data_ptr());
}

// CUDA's CUlaunchConfig; no launch has attributes.
struct LaunchConfig {
  unsigned grid[3], block[3], shared_memory_bytes;
  void* stream;
  void* attributes;
  unsigned num_attributes;
};

// Function, configuration, (kind, bytes) of each parameter, slots, multipliers of the scale: the
// first three are those of DriverLaunch.contents in kernels/launching/driver.py.
using Contents = std::tuple<
    uint64_t, std::string, std::vector<std::pair<int, std::string>>, std::vector<size_t>,
    std::vector<double>>;

// A kernel on a grid, with its parameters.
class Launch {
 public:
  explicit Launch(const Contents& contents) {
    const auto& [function, config, parameters, slots, multipliers] = contents;
    function_ = reinterpret_cast<void*>(function);
    TORCH_CHECK(config.size() == sizeof(config_), "a launch's configuration has another size");
    std::memcpy(&config_, config.data(), sizeof(config_));
    // Addresses of these are kept.
    parameters_.resize(parameters.size());
    size_t next_slot = 0, next_multiplier = 0;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& [kind, bytes] = parameters[i];
      char* where = parameters_[i].bytes;
      TORCH_CHECK(bytes.size() <= sizeof(Parameter), "a parameter is too large");
      std::memcpy(where, bytes.data(), bytes.size());
      pointers_.push_back(where);
      if (kind == kFloat) {
        floats_.push_back({where, multipliers.at(next_multiplier++)});
      } else if (kind != kFixed) {
        const size_t slot = slots.at(next_slot++);
        TORCH_CHECK(slot < kMaxSlots, "a launch has too many tensors");
        (kind == kMap ? maps_ : words_).push_back({where, slot, 0});
      }
    }
    TORCH_CHECK(
        next_slot == slots.size() && next_multiplier == multipliers.size(),
        "a launch has other parameters than it is called with");
  }

  // CUDA's error, or 0.
  int operator()(const Addresses& addresses, double scale, void* stream) {
    for (auto& map : maps_) {
      const uint64_t address = addresses[map.slot];
      if (address != map.leads_to) {
        // Whether a call that failed has changed the map is not known.
        map.leads_to = 0;
        if (const int error =
                driver.replace_address(map.where, reinterpret_cast<void*>(address))) {
          return error;
        }
        map.leads_to = address;
      }
    }
    for (const auto& word : words_) {
      std::memcpy(word.where, &addresses[word.slot], sizeof(uint64_t));
    }
    for (const auto& number : floats_) {
      const auto value = static_cast<float>(scale * number.multiplier);
      std::memcpy(number.where, &value, sizeof(value));
    }
    config_.stream = stream;
    return driver.launch(&config_, function_, pointers_.data(), nullptr);
  }

 private:
  // PARAMETER_KINDS of driver.py.
  enum Kind { kFixed, kMap, kWord, kFloat };
  struct Parameter {
    alignas(64) char bytes[128];
  };
  struct Address {
    char* where;
    size_t slot;
    // Of maps: what they were last given; allocators give the same addresses again and again.
    uint64_t leads_to;
  };
  struct Float {
    char* where;
    double multiplier;
  };

  void* function_;
  LaunchConfig config_;
  std::vector<Parameter> parameters_;
  std::vector<void*> pointers_;
  std::vector<Address> maps_, words_;
  std::vector<Float> floats_;
};

// The launches of a forward or a backward pass.
class Pass {
 public:
  explicit Pass(const std::vector<Contents>& launches) {
    for (const auto& contents : launches) {
      launches_.emplace_back(contents);
    }
    TORCH_CHECK(driver.get_context(&context_) == 0, "CUDA has no current context");
  }

  // False if the driver refuses, which Triton may explain.
  bool operator()(const Addresses& addresses, double scale, const at::Device& device) {
    void* stream = nullptr;
    if (driver.current_stream(device.index(), &stream)) {
      return false;
    }
    // A thread of the autograd engine may have none yet.
    void* context = nullptr;
    if (driver.get_context(&context) || (!context && driver.set_context(context_))) {
      return false;
    }
    // The parameters are one place, and the backward pass runs in a thread of its own.
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& launch : launches_) {
      if (launch(addresses, scale, stream)) {
        return false;
      }
    }
    return true;
  }

 private:
  std::mutex mutex_;
  std::deque<Launch> launches_;
  void* context_ = nullptr;
};

// Memory that a pass needs besides its tensors, of which parts begin at offsets.
class Workspace {
 public:
  Workspace(std::vector<int64_t> offsets, int64_t bytes)
      : offsets_(std::move(offsets)), bytes_(bytes) {
    TORCH_CHECK_VALUE(kNumTensors + offsets_.size() <= kMaxSlots, "too many parts of a workspace");
  }

  // To be held until the pass has been launched; undefined if there is none.
  Tensor allocate(Addresses& addresses, const Tensor& like) const {
    if (!bytes_) {
      return {};
    }
    auto memory = at::empty({bytes_}, like.options().dtype(at::kByte));
    for (size_t part = 0; part < offsets_.size(); ++part) {
      addresses[kNumTensors + part] = address_of(memory) + offsets_[part];
    }
    return memory;
  }

 private:
  std::vector<int64_t> offsets_;
  int64_t bytes_;
};

using Strides = std::array<int64_t, 4>;

std::optional<Strides> strides_of(const Tensor& x) {
  if (x.dim() != 4) {
    return std::nullopt;
  }
  return Strides{x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

struct Backward {
  Strides do_strides;
  Strides dq, dk, dv;
  Workspace workspace;
  Pass pass;
};

// Device, dtype, causal, kind of options, and the layout of q, k and v, where v is as large as k.
using Key = std::array<int64_t, 4 + 5 * 4>;

struct Plan {
  Key key;
  // Of ordinary tensors: no subclass, no wrapper of a functional transformation, no lazy negation.
  c10::DispatchKeySet keys;
  Strides o;
  // Whether the forward pass gives what float32 rounds away of lse, which the backward pass takes.
  bool has_rest;
  Workspace workspace;
  Pass forward;
  std::mutex mutex;
  std::vector<std::shared_ptr<Backward>> backwards;

  std::shared_ptr<Backward> backward_for(const Strides& do_strides) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& backward : backwards) {
      if (backward->do_strides == do_strides) {
        return backward;
      }
    }
    return nullptr;
  }
};

std::mutex plans_mutex;
std::map<Key, std::shared_ptr<Plan>>& plans() {
  // Outlives whatever runs when the process ends.
  static auto* all = new std::map<Key, std::shared_ptr<Plan>>();
  return *all;
}

std::optional<Key> key_of(
    const Tensor& q, const Tensor& k, const Tensor& v, bool causal, int64_t kind) {
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4 || k.sizes() != v.sizes() ||
      k.scalar_type() != q.scalar_type() || v.scalar_type() != q.scalar_type() ||
      k.device() != q.device() || v.device() != q.device()) {
    return std::nullopt;
  }
  Key key;
  key[0] = static_cast<int64_t>(q.device().type()) * 256 + q.device().index();
  key[1] = static_cast<int64_t>(q.scalar_type());
  key[2] = causal;
  key[3] = kind;
  auto* next = key.data() + 4;
  for (const auto part : {q.sizes(), q.strides(), k.sizes(), k.strides(), v.strides()}) {
    next = std::copy(part.begin(), part.end(), next);
  }
  return key;
}

std::shared_ptr<Plan> plan_of(const std::optional<Key>& key) {
  if (!key) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(plans_mutex);
  const auto found = plans().find(*key);
  return found == plans().end() ? nullptr : found->second;
}

// Modes that see every operation, functional transformations, or code that autograd is not to see.
bool is_watched() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  constexpr auto usual = c10::default_included_set | c10::autocast_dispatch_keyset;
  return (local.included_.raw_repr() & ~usual.raw_repr()) != 0 ||
      local.excluded_.has_any(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
}

bool are_aligned(const Addresses& addresses) {
  uint64_t all = 0;
  for (const uint64_t address : addresses) {
    all |= address;
  }
  return all % kAlignment == 0;
}

Tensor empty(at::IntArrayRef sizes, const Strides& strides, const Tensor& like) {
  return at::empty_strided(sizes, strides, like.options());
}

variable_list call_python(
    const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
    const Tensor& lse, const Tensor& rest, const Plan& plan, double scale) {
  const pybind11::gil_scoped_acquire gil;
  try {
    const py::handle function(backward_in_python);
    const bool causal = plan.key[2] != 0;
    return py::cast<variable_list>(
        function(d_o, q, k, v, o, lse, rest, causal, scale, plan.key[3]));
  } catch (py::error_already_set& raised) {
    // As Python's own nodes raise it, for the engine to bring to whoever called backward.
    raised.restore();
    python_error error;
    error.persist();
    throw error;
  }
}

// Empty if this cannot be done here.
variable_list run_backward(
    Plan& plan, const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
    const Tensor& lse, const Tensor& rest, double scale) {
  // A hook may have given back other tensors than were saved.
  const auto key = key_of(q, k, v, plan.key[2] != 0, plan.key[3]);
  const bool is_as_planned = key && *key == plan.key && strides_of(o) == plan.o &&
      lse.is_contiguous() && d_o.sizes() == q.sizes() && o.sizes() == q.sizes() &&
      d_o.scalar_type() == q.scalar_type() && o.scalar_type() == q.scalar_type() &&
      lse.scalar_type() == at::kFloat && d_o.device() == q.device() &&
      o.device() == q.device() && lse.device() == q.device();
  if (!is_as_planned || is_watched()) {
    return {};
  }
  for (const Tensor* x : {&d_o, &q, &k, &v, &o, &lse}) {
    if (x->key_set() != plan.keys) {
      return {};
    }
  }
  if (rest.defined() != plan.has_rest) {
    return {};
  }
  if (rest.defined() &&
      (!rest.is_contiguous() || rest.sizes() != lse.sizes() || rest.scalar_type() != at::kFloat ||
       rest.device() != q.device() || rest.key_set() != plan.keys)) {
    return {};
  }
  const auto backward = plan.backward_for(*strides_of(d_o));
  if (!backward) {
    return {};
  }
  const at::AutoDispatchBelowADInplaceOrView kernels_only;
  const c10::DeviceGuard guard(q.device());
  auto dq = empty(q.sizes(), backward->dq, q);
  auto dk = empty(k.sizes(), backward->dk, k);
  auto dv = empty(v.sizes(), backward->dv, v);
  Addresses addresses{
      address_of(q), address_of(k), address_of(v), address_of(o), address_of(lse),
      rest.defined() ? address_of(rest) : 0,
      address_of(d_o), address_of(dq), address_of(dk), address_of(dv)};
  const auto workspace = backward->workspace.allocate(addresses, q);
  if (!are_aligned(addresses) || !backward->pass(addresses, scale, q.device())) {
    return {};
  }
  return {std::move(dq), std::move(dk), std::move(dv)};
}

struct FlashAttentionBackward : Node {
  FlashAttentionBackward(
      torch::autograd::edge_list&& edges, std::shared_ptr<Plan> plan, double scale)
      : Node(std::move(edges)), plan_(std::move(plan)), scale_(scale) {}

  std::string name() const override {
    return "FlashAttentionBackward";
  }

  // Rest is undefined if there is none.
  void save(
      const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
      const Tensor& rest) {
    q_ = SavedVariable(q, false);
    k_ = SavedVariable(k, false);
    v_ = SavedVariable(v, false);
    o_ = SavedVariable(o, true);
    lse_ = SavedVariable(lse, false);
    rest_ = SavedVariable(rest, false);
  }

  variable_list apply(variable_list&& gradients) override {
    Tensor q, k, v, o, lse, rest;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      q = q_.unpack();
      k = k_.unpack();
      v = v_.unpack();
      o = o_.unpack(getptr());
      lse = lse_.unpack();
      rest = rest_.unpack();
    }
    auto& given = gradients[0];
    auto d_o = given.defined() ? std::move(given) : at::zeros_like(o);
    const bool is_differentiated =
        torch::autograd::compute_requires_grad(d_o, q, k, v);
    auto made = run_backward(*plan_, d_o, q, k, v, o, lse, rest, scale_);
    if (made.empty()) {
      made = call_python(d_o, q, k, v, o, lse, rest, *plan_, scale_);
    }
    if (is_differentiated) {
      const auto sources = torch::autograd::collect_next_edges(d_o, q, k, v);
      for (auto& gradient : made) {
        gradient = not_differentiable(gradient, sources);
      }
    }
    return made;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* saved : {&q_, &k_, &v_, &o_, &lse_, &rest_}) {
      saved->reset_data();
    }
  }

 private:
  // Itself, but a second derivative through it is an error rather than zero.
  static Tensor not_differentiable(
      const Tensor& gradient, const torch::autograd::edge_list& sources);

  std::shared_ptr<Plan> plan_;
  double scale_;
  SavedVariable q_, k_, v_, o_, lse_, rest_;
};

// Torch holds nodes by shared_ptr until 2.12, and by intrusive_ptr since.
using NodePointer = decltype(torch::autograd::Edge::function);

template <typename T, typename Pointer = NodePointer>
Pointer held(T* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    // torch::autograd::deleteNode, found by its argument, where torch has it.
    return Pointer(node, [](T* last) { deleteNode(last); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

// Without edges to what the gradient depends on, torch.autograd.grad would pass the error by.
Tensor FlashAttentionBackward::not_differentiable(
    const Tensor& gradient, const torch::autograd::edge_list& sources) {
  auto result = gradient.detach();
  torch::autograd::set_history(
      result,
      held(new torch::autograd::Error(
          "flash_attention: second derivatives are not available; attention=naive has them",
          torch::autograd::edge_list(sources))));
  return result;
}

// Undefined if Python is to run it.
Tensor run_attend(
    const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale, int64_t kind) {
  // Nor is a scale that is not a number above zero, in float32 too.
  if (!(scale > std::numeric_limits<float>::min()) || !std::isfinite(scale) || is_watched()) {
    return {};
  }
  auto plan = plan_of(key_of(q, k, v, causal, kind));
  if (!plan) {
    return {};
  }
  for (const auto* x : {&q, &k, &v}) {
    // Forward-mode derivatives have no formula here, which Python says.
    if (x->key_set() != plan->keys || torch::autograd::isFwGradDefined(*x)) {
      return {};
    }
  }
  Tensor o, lse, rest;
  {
    const at::AutoDispatchBelowADInplaceOrView kernels_only;
    const c10::DeviceGuard guard(q.device());
    o = empty(q.sizes(), plan->o, q);
    lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(at::kFloat));
    if (plan->has_rest) {
      rest = at::empty_like(lse);
    }
    Addresses addresses{
        address_of(q), address_of(k), address_of(v), address_of(o), address_of(lse),
        plan->has_rest ? address_of(rest) : 0};
    const auto workspace = plan->workspace.allocate(addresses, q);
    if (!are_aligned(addresses) || !plan->forward(addresses, scale, q.device())) {
      return {};
    }
  }
  if (torch::autograd::compute_requires_grad(q, k, v)) {
    auto* node = new FlashAttentionBackward(
        torch::autograd::collect_next_edges(q, k, v), std::move(plan), scale);
    torch::autograd::set_history(o, held(node));
    node->save(q, k, v, o, lse, rest);
  }
  return o;
}

PyObject* attend(PyObject*, PyObject* const* arguments, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(number == 6, "attend takes q, k, v, causal, scale and kind");
  for (int i = 0; i < 3; ++i) {
    if (!THPVariable_CheckExact(arguments[i])) {
      Py_RETURN_NONE;
    }
  }
  if (!PyBool_Check(arguments[3]) || !(PyFloat_Check(arguments[4]) || PyLong_Check(arguments[4]))) {
    Py_RETURN_NONE;
  }
  const double scale = PyFloat_AsDouble(arguments[4]);
  const int64_t kind = PyLong_AsLongLong(arguments[5]);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  Tensor o;
  {
    const pybind11::gil_scoped_release released;
    o = run_attend(
        THPVariable_Unpack(arguments[0]),
        THPVariable_Unpack(arguments[1]),
        THPVariable_Unpack(arguments[2]),
        arguments[3] == Py_True,
        scale,
        kind);
  }
  if (!o.defined()) {
    Py_RETURN_NONE;
  }
  return THPVariable_Wrap(o);
  END_HANDLE_TH_ERRORS
}

// Once, before anything else: the addresses of Driver's functions, and Python's backward pass.
void connect(
    uint64_t launch, uint64_t replace, uint64_t get_context, uint64_t set_context,
    uint64_t current_stream, const py::object& backward) {
  driver.launch = reinterpret_cast<decltype(driver.launch)>(launch);
  driver.replace_address = reinterpret_cast<decltype(driver.replace_address)>(replace);
  driver.get_context = reinterpret_cast<decltype(driver.get_context)>(get_context);
  driver.set_context = reinterpret_cast<decltype(driver.set_context)>(set_context);
  driver.current_stream = reinterpret_cast<decltype(driver.current_stream)>(current_stream);
  Py_XDECREF(backward_in_python);
  backward_in_python = py::object(backward).release().ptr();
}

// What later calls like the one with these q, k, v and o are to launch.
void learn_forward(
    const std::array<Tensor, 4>& x, bool causal, int64_t kind, bool has_rest,
    const std::vector<int64_t>& offsets, int64_t bytes, const std::vector<Contents>& launches) {
  const auto key = key_of(x[0], x[1], x[2], causal, kind);
  const auto o = strides_of(x[3]);
  TORCH_CHECK_VALUE(key && o, "q, k, v and o do not fit each other");
  const auto ordinary = at::empty({0}, x[0].options()).key_set();
  std::shared_ptr<Plan> plan(new Plan{
      *key, ordinary, *o, has_rest, Workspace(offsets, bytes), Pass(launches), {}, {}});
  const std::lock_guard<std::mutex> lock(plans_mutex);
  if (plans().size() >= kMaxPlans) {
    plans().clear();
  }
  plans()[*key] = std::move(plan);
}

// The same for the backward pass, of q, k, v, o, do, dq, dk and dv.
void learn_backward(
    const std::array<Tensor, 8>& x, bool causal, int64_t kind,
    const std::vector<int64_t>& offsets, int64_t bytes, const std::vector<Contents>& launches) {
  const auto plan = plan_of(key_of(x[0], x[1], x[2], causal, kind));
  if (!plan) {
    return;
  }
  for (const auto& tensor : x) {
    TORCH_CHECK_VALUE(strides_of(tensor), "a tensor does not have four dimensions");
  }
  // A hook may have given back another o than was saved, which the launches are of.
  if (strides_of(x[3]) != plan->o) {
    return;
  }
  std::shared_ptr<Backward> backward(new Backward{
      *strides_of(x[4]), *strides_of(x[5]), *strides_of(x[6]), *strides_of(x[7]),
      Workspace(offsets, bytes), Pass(launches)});
  const std::lock_guard<std::mutex> lock(plan->mutex);
  for (auto& known : plan->backwards) {
    if (known->do_strides == backward->do_strides) {
      known = std::move(backward);
      return;
    }
  }
  if (plan->backwards.size() >= kMaxBackwards) {
    plan->backwards.clear();
  }
  plan->backwards.push_back(std::move(backward));
}

void forget() {
  const std::lock_guard<std::mutex> lock(plans_mutex);
  plans().clear();
}

// Called for every attention: without pybind11's look at the arguments.
PyMethodDef attend_method = {
    "attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attend)), METH_FASTCALL,
    nullptr};

} // namespace

PYBIND11_MODULE(_native, module) {
  module.def("connect", connect);
  module.def("learn_forward", learn_forward);
  module.def("learn_backward", learn_backward);
  module.def("forget", forget);
  module.add_object(
      "attend", py::reinterpret_steal<py::object>(PyCFunction_New(&attend_method, nullptr)));
}
