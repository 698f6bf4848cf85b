// sb3_fp16._cpu: one call runs a whole PPO update, one acts in all environments. Plans and rollouts are addresses and
// sizes; the caller keeps the memory alive.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "plan.h"

namespace py = pybind11;
using namespace sb3_fp16;

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

bool supports(const std::string& isa) {
#if defined(__x86_64__)
    if (isa == "avx512") return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c");
    if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    return isa == "portable";
}

std::string best() {
    for (const char* isa : {"avx512", "avx2"})
        if (supports(isa)) return isa;
    return "portable";
}

const Engine& engine_of(const std::string& isa) {
    if (!supports(isa)) throw std::invalid_argument("this processor does not support " + isa);
#if defined(__x86_64__)
    if (isa == "avx512") return engine_avx512;
    if (isa == "avx2") return engine_avx2;
#endif
    return engine_portable;
}

// A name among several, in the order of an enumeration.
template <class Enumeration>
Enumeration named(const std::string& name, std::initializer_list<const char*> names) {
    int position = 0;
    for (const char* candidate : names) {
        if (name == candidate) return static_cast<Enumeration>(position);
        ++position;
    }
    throw std::invalid_argument("unknown name " + name);
}

// fp32, fp16, bf16, or e5mX with X bits of significand.
Storage storage_of(const std::string& name) {
    return name.rfind("e5m", 0) == 0 ? Storage::short_half : named<Storage>(name, {"fp32", "fp16", "bf16"});
}

int significand_bits_of(const std::string& name) { return name.rfind("e5m", 0) == 0 ? std::stoi(name.substr(3)) : 10; }

Rounding rounding_of(const std::string& name) {
    return named<Rounding>(name, {"nearest", "stochastic", "dithered", "residual", "swallowed", "fp32"});
}

template <class T>
T* pointer(const py::handle& address) {
    return reinterpret_cast<T*>(address.cast<uintptr_t>());
}

Parameter parameter_of(const py::dict& given, bool has_state) {
    Parameter p{};
    p.data = pointer<void>(given["data"]);
    p.rows = given["rows"].cast<int64_t>(), p.columns = given["columns"].cast<int64_t>();
    if (!has_state) return p;
    p.first_moment = pointer<void>(given["first_moment"]);
    p.root_second_moment = pointer<void>(given["root_second_moment"]);
    p.carry = pointer<float>(given["carry"]);
    p.step = pointer<int64_t>(given["step"]), p.adam_step = pointer<float>(given["step"]);
    p.first_element = static_cast<uint32_t>(given["first_element"].cast<uint64_t>());
    p.network = given["coefficient"].cast<int>();
    p.sharing = named<Sharing>(given["sharing"].cast<std::string>(), {"elementwise", "row", "rank1"});
    p.writeback = rounding_of(given["writeback"].cast<std::string>());
    return p;
}

Network network_of(const py::list& layers) {
    Network network;
    for (const py::handle& given : layers) {
        const auto [weight, bias, inputs, outputs, activation, slope] =
            given.cast<std::tuple<int, int, int64_t, int64_t, std::string, float>>();
        const auto kind = named<Activation>(
            activation, {"none", "tanh", "relu", "leaky_relu", "elu", "silu", "gelu", "gelu_tanh"});
        network.push_back({weight, bias, inputs, outputs, kind, slope});
    }
    return network;
}

Plan plan_of(const py::dict& given, bool has_state) {
    Plan plan{};
    const std::string storage = given["storage"].cast<std::string>();
    plan.storage = storage_of(storage), plan.compute = storage_of(given["compute"].cast<std::string>());
    plan.significand_bits = significand_bits_of(storage);
    plan.stochastic_copy = given["stochastic_copy"].cast<bool>();
    for (const py::handle& p : given["parameters"]) plan.parameters.push_back(parameter_of(p.cast<py::dict>(), has_state));
    plan.policy = network_of(given["policy"].cast<py::list>()), plan.value = network_of(given["value"].cast<py::list>());
    plan.head = named<Head>(given["head"].cast<std::string>(), {"gaussian", "categorical", "bernoulli"});
    plan.choices = given["choices"].cast<std::vector<int64_t>>();
    plan.log_std = given["log_std"].cast<int>();
    plan.two_sum = given["two_sum"].cast<bool>(), plan.naive = given["naive"].cast<bool>();
    plan.round_actions = given["round_actions"].cast<bool>();
    plan.networks = given["networks"].cast<int>(), plan.threads = given["threads"].cast<int>();
    plan.compares = given["compares"].cast<bool>();
    return plan;
}

Rollout rollout_of(const py::dict& given) {
    Rollout rollout{};
    rollout.observations = pointer<void>(given["observations"]), rollout.actions = pointer<void>(given["actions"]);
    rollout.values = pointer<void>(given["values"]), rollout.advantages = pointer<void>(given["advantages"]);
    rollout.returns = pointer<void>(given["returns"]), rollout.behaviour = pointer<void>(given["behaviour"]);
    rollout.log_std = pointer<void>(given["log_std"]), rollout.correction = pointer<void>(given["correction"]);
    rollout.old_log_prob = pointer<void>(given["old_log_prob"]);
    return rollout;
}

OptimizerSettings optimizer_settings_of(const py::dict& given, double lr) {
    const auto number = [&](const char* name) { return given[name].cast<double>(); };
    return {lr, number("beta1"), number("beta2"), number("eps"), number("weight_decay"), number("state_scale"),
            given["decoupled_weight_decay"].cast<bool>(), rounding_of(given["root_rounding"].cast<std::string>()),
            static_cast<uint32_t>(given["seed"].cast<uint64_t>())};
}

Settings settings_of(const py::dict& given) {
    const auto single = [&](const char* name) { return given[name].cast<float>(); };
    Settings settings{optimizer_settings_of(given, given["lr"].cast<double>())};
    settings.samples = given["samples"].cast<int64_t>(), settings.batch_size = given["batch_size"].cast<int64_t>();
    settings.n_epochs = given["n_epochs"].cast<int64_t>();
    settings.clip_lower = single("clip_lower"), settings.clip_upper = single("clip_upper");
    settings.clip_range_vf = single("clip_range_vf"), settings.target_kl = single("target_kl");
    settings.normalize_advantage = given["normalize_advantage"].cast<bool>();
    settings.ent_coef = single("ent_coef"), settings.vf_coef = single("vf_coef"), settings.max_grad_norm = single("max_grad_norm");
    const auto floor = given["scale_floor"].cast<std::vector<float>>(), ceiling = given["scale_ceiling"].cast<std::vector<float>>();
    std::copy(floor.begin(), floor.end(), settings.scale_floor), std::copy(ceiling.begin(), ceiling.end(), settings.scale_ceiling);
    return settings;
}

py::dict dictionary_of(const Stats& stats) {
    py::dict result;
    result["entropy_loss"] = stats.entropy_loss, result["policy_loss"] = stats.policy_loss;
    result["value_loss"] = stats.value_loss, result["approx_kl"] = stats.approx_kl;
    result["clip_fraction"] = stats.clip_fraction, result["loss"] = stats.loss, result["grad_norm"] = stats.grad_norm;
    result["nonzero"] = stats.nonzero, result["stuck"] = stats.stuck, result["saturated"] = stats.saturated;
    result["epochs"] = stats.epochs, result["diverged"] = stats.diverged;
    result["stopped_at_kl"] = stats.stopped ? py::object(py::float_(stats.stopped_at_kl)) : py::object(py::none());
    return result;
}

// Whether Python has a signal to handle; asked rarely, as another thread may hold the GIL for long.
bool interrupted() {
    using Clock = std::chrono::steady_clock;
    thread_local Clock::time_point asked = Clock::now();
    if (Clock::now() - asked < std::chrono::milliseconds(20)) return false;
    py::gil_scoped_acquire acquire;
    asked = Clock::now();
    return PyErr_CheckSignals() != 0;
}

py::dict update(const std::string& isa, const py::dict& plan_, const py::dict& rollout_, const py::dict& settings_,
                py::array_t<int64_t, py::array::c_style> order, py::array_t<float, py::array::c_style> scales,
                py::array_t<int64_t, py::array::c_style> counters) {
    const Plan plan = plan_of(plan_, true);
    const Rollout rollout = rollout_of(rollout_);
    const Settings settings = settings_of(settings_);
    if (order.size() != settings.samples * settings.n_epochs || scales.size() != plan.networks || counters.size() != 3)
        throw std::invalid_argument("order, scales or counters have the wrong size");

    float* s = scales.mutable_data();
    int64_t* c = counters.mutable_data();
    Scale scale{{s[0], s[plan.networks - 1]}, c[0], c[1], c[2]};
    const Engine& engine = engine_of(isa);
    const int64_t* rows = order.data();
    Stats stats;
    {
        py::gil_scoped_release release;
        stats = engine.update(plan, rollout, settings, rows, scale, interrupted);
    }
    for (int k = 0; k < plan.networks; ++k) s[k] = scale.scales[k];
    c[0] = scale.good_steps, c[1] = scale.skipped_steps, c[2] = scale.skips_at_floor;
    if (PyErr_Occurred()) throw py::error_already_set();
    return dictionary_of(stats);
}

const std::vector<std::pair<std::string, std::string>> OPTIMIZER_FORMATS = {
    {"fp16", "fp16"}, {"bf16", "bf16"}, {"fp32", "fp16"}, {"fp32", "bf16"}, {"fp32", "fp32"}};

// Steps of SHARP over parameters whose memory stays where it is, with the interface of sb3_fp16._cuda's.
class Optimizer {
public:
    Optimizer(const std::string& storage_, const std::string& state_, const std::vector<py::dict>& entries,
              const std::string& isa)
        : engine(engine_of(isa.empty() ? best() : isa)), storage(storage_of(storage_)), state(storage_of(state_)) {
        if (std::count(OPTIMIZER_FORMATS.begin(), OPTIMIZER_FORMATS.end(), std::make_pair(storage_, state_)) == 0)
            throw std::invalid_argument("no step serves parameters in " + storage_ + " with moments in " + state_);
        for (const py::dict& entry : entries) {
            Parameter p = parameter_of(entry, true);
            if (p.rows < 1 || p.columns < 1) throw std::invalid_argument("a parameter has no elements");
            if (p.sharing == Sharing::elementwise && p.columns % LANES != 0) p.columns *= p.rows, p.rows = 1;
            floats = std::max(floats, p.rows * ((p.columns + LANES - 1) / LANES * LANES));
            parameters.push_back(p);
        }
    }

    int64_t workspace() const { return floats * static_cast<int64_t>(sizeof(float)); }

    // A CPU has one device and no streams; the norm is the caller's.
    void step(int, uintptr_t, uintptr_t workspace, const std::vector<uintptr_t>& addresses, const py::dict& given,
              const py::none&) {
        if (addresses.size() != parameters.size()) throw std::invalid_argument("one gradient per parameter is needed");
        const bool* skip = pointer<bool>(given["skip"]);
        if (skip && *skip) return;
        const int storage_bits = given["parameter_bits"].cast<int>(), state_bits = given["state_bits"].cast<int>();
        std::vector<const void*> gradients;
        for (const uintptr_t address : addresses) gradients.push_back(reinterpret_cast<const void*>(address));
        const SharpStep step{shortened(storage, storage_bits), shortened(state, state_bits), storage_bits, state_bits,
                             parameters, gradients.data(), pointer<float>(given["coefficients"]),
                             reinterpret_cast<float*>(workspace), given["threads"].cast<int>(),
                             optimizer_settings_of(given, static_cast<double>(*pointer<float>(given["lr"])))};
        StepCounts found;
        {
            py::gil_scoped_release release;
            found = engine.sharp(step);
        }
        if (int64_t* counts = pointer<int64_t>(given["counts"]))
            counts[0] += found.nonzero, counts[1] += found.stuck, counts[2] += found.saturated;
    }

private:
    static Storage shortened(Storage kind, int bits) {
        return kind == Storage::fp16 && bits < 10 ? Storage::short_half : kind;
    }

    const Engine& engine;
    const Storage storage, state;
    std::vector<Parameter> parameters;
    int64_t floats = 0;
};

// A policy's actor; returned arrays are fresh.
class PolicyActor {
public:
    PolicyActor(const std::string& isa, const py::dict& plan_)
        : plan(plan_of(plan_, false)), actor(engine_of(isa).make_actor(plan)), corrects(plan_["corrects"].cast<bool>()),
          hands_on(plan_["hands_on"].cast<bool>()) {}

    // (flags, actions, values, log-probabilities, behaviour, correction); None where not wanted.
    py::tuple act(const py::array& observations, const py::object& noise, bool wants_actions, bool wants_values, bool look) {
        Acting step{};
        Floats draws;
        step.look = look;
        step.observations_are_double = py::isinstance<py::array_t<double>>(observations);
        const int64_t size = plan.policy.front().inputs;
        if (!(observations.flags() & py::array::c_style) || observations.size() % size != 0 ||
            !(step.observations_are_double || py::isinstance<py::array_t<float>>(observations)))
            throw std::invalid_argument("observations must be FP32 or FP64, contiguous, and of the policy's size");
        step.observations = observations.data(), step.count = observations.size() / size;
        py::object actions = py::none(), values = py::none(), log_prob = py::none(), behaviour = py::none(), correction = py::none();
        const auto make = [&](py::object& array, float*& data, std::vector<int64_t> shape) {
            py::array_t<float> made(shape);
            data = made.mutable_data(), array = std::move(made);
        };
        if (wants_values) make(values, step.values, {step.count, 1});
        if (wants_actions) {
            const int64_t outputs = plan.policy.back().outputs;
            const int64_t wide = plan.head == Head::categorical ? static_cast<int64_t>(plan.choices.size()) : outputs;
            make(actions, step.actions, {step.count, wide});
            make(log_prob, step.log_prob, {step.count});
            if (hands_on) make(behaviour, step.behaviour, {step.count, outputs});
            if (corrects) make(correction, step.correction, {step.count});
            if (!noise.is_none()) {
                draws = noise.cast<Floats>();
                if (draws.size() != step.count * outputs) throw std::invalid_argument("noise has the wrong size");
                step.noise = draws.data();
            }
        }
        const int flags = actor->act(step);
        return py::make_tuple(flags, actions, values, log_prob, behaviour, correction);
    }

private:
    const Plan plan;
    std::unique_ptr<Actor> actor;
    bool corrects, hands_on;
};

int64_t gae(const std::string& isa, const std::string& storage, const py::dict& arrays, const Floats& last_values,
            const Floats& last_continues, double gamma, double lambda) {
    const py::array rewards = arrays["rewards"].cast<py::array>();
    if (rewards.ndim() != 2) throw std::invalid_argument("rewards have two dimensions");
    const int64_t steps = rewards.shape(0), envs = rewards.shape(1);
    const auto words = [&](const char* name) {
        const py::array array = arrays[name].cast<py::array>();
        const py::ssize_t bytes = std::string(name) == "episode_starts" ? 1 : storage_of(storage) == Storage::fp32 ? 4 : 2;
        if (array.size() != steps * envs || array.itemsize() != bytes || !(array.flags() & py::array::c_style))
            throw std::invalid_argument(std::string(name) + " has another size or layout than the rollout");
        return array;
    };
    if (last_values.size() != envs || last_continues.size() != envs) throw std::invalid_argument("one last value per environment");
    return engine_of(isa).gae({storage_of(storage), significand_bits_of(storage), steps, envs, words("rewards").data(), words("values").data(),
                               static_cast<const uint8_t*>(words("episode_starts").data()), last_values.data(), last_continues.data(),
                               gamma, lambda, words("advantages").mutable_data(), words("returns").mutable_data()});
}

// Where one rollout's steps go; keeps its arrays.
class Recorder {
public:
    Recorder(const std::string& isa, const std::string& storage_, std::vector<py::object> arrays_)
        : engine(engine_of(isa)), storage(storage_of(storage_)), significand_bits(significand_bits_of(storage_)),
          arrays(std::move(arrays_)) {}

    // One step's arrays into row `step`, as many as were given; returns how many values of each saturated, or None if an
    // array needs more than this, because its type is unexpected or a number is not finite.
    py::object record(int64_t step, const std::vector<py::object>& values) {
        if (values.size() != arrays.size()) throw std::invalid_argument("as many values as arrays are needed");
        py::tuple counts(values.size());
        for (size_t i = 0; i < values.size(); ++i) {
            const int64_t saturated = arrays[i].is_none() ? 0 : put(py::reinterpret_borrow<py::array>(arrays[i]), step, values[i]);
            if (saturated < 0) return py::none();
            counts[i] = saturated;
        }
        return counts;
    }

private:
    int64_t put(py::array array, int64_t step, const py::object& given) {
        if (!py::isinstance<py::array>(given)) return -1;
        const py::array values = py::reinterpret_borrow<py::array>(given);
        const int64_t size = array.size() / array.shape(0);
        if (step < 0 || step >= array.shape(0) || values.size() != size || !(values.flags() & py::array::c_style)) return -1;
        char* row = static_cast<char*>(array.mutable_data()) + step * size * array.itemsize();
        const char from = values.dtype().kind(), to = array.dtype().kind();
        if (values.dtype().byteorder() == '>') return -1;
        if (from == 'f' && (to == 'f' || to == 'V') && array.itemsize() <= 4) {
            const Storage kind = array.itemsize() == 4 ? Storage::fp32 : storage;  // log-probabilities are always FP32
            if (values.itemsize() == 4) return engine.store(kind, significand_bits, static_cast<const float*>(values.data()), row, size);
            const Floats single = Floats::ensure(values);
            if (!single) return -1;
            return engine.store(kind, significand_bits, single.data(), row, size);
        }
        if (from == to && values.itemsize() == array.itemsize())
            memcpy(row, values.data(), static_cast<size_t>(size * array.itemsize()));
        else
            return -1;
        return 0;
    }

    const Engine& engine;
    const Storage storage;
    const int significand_bits;
    std::vector<py::object> arrays;
};

int64_t store(const std::string& isa, const std::string& storage, const Floats& values, py::array& stored) {
    const Storage kind = storage_of(storage);
    if (values.size() != stored.size() || !(stored.flags() & py::array::c_style) || stored.itemsize() != (kind == Storage::fp32 ? 4 : 2))
        throw std::invalid_argument("stored has another size or layout than values");
    return engine_of(isa).store(kind, significand_bits_of(storage), values.data(), stored.mutable_data(), values.size());
}

Floats load(const std::string& isa, const std::string& storage, const py::array& stored) {
    const Storage kind = storage_of(storage);
    if (!(stored.flags() & py::array::c_style) || stored.itemsize() != (kind == Storage::fp32 ? 4 : 2))
        throw std::invalid_argument("stored has the wrong layout");
    Floats result(stored.size());
    engine_of(isa).load(kind, significand_bits_of(storage), stored.data(), result.mutable_data(), stored.size());
    return result;
}

Floats elementwise(const std::string& isa, const std::string& name, const Floats& values) {
    const int function = named<int>(name, {"tanh", "exp", "expm1", "log", "log1p", "erf"});
    Floats result(values.size());
    engine_of(isa).elementwise(function, values.data(), result.mutable_data(), values.size());
    return result;
}

Floats rounded(const std::string& isa, const std::string& storage, const Floats& values) {
    Floats result(values.size());
    engine_of(isa).round(storage_of(storage), significand_bits_of(storage), values.data(), result.mutable_data(), values.size());
    return result;
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    m.doc() = "PPO updates and actions of MLP policies, and steps of SHARP for any model, each in one native call.";
    m.attr("OPTIMIZER_FORMATS") = OPTIMIZER_FORMATS;
    m.def("supports", &supports, "Whether this processor runs an instruction set.");
    m.def("best", &best, "The best instruction set of this processor.");
    m.def("store", &store, "Round FP32 values to storage, saturating; returns how many saturated, -1 if one is not finite.");
    m.def("gae", &gae, "Fill advantages and returns of a rollout; returns how many saturated.");
    m.def("load", &load, "FP32 values of numbers in storage.");
    m.def("rounded", &rounded, "FP32 values rounded to nearest in a format, beyond its range to infinity.");
    m.def("elementwise", &elementwise, "An elementary function of FP32 values, as the engine computes it.");
    m.def("update", &update, "Run all epochs on a rollout; trains parameters and optimizer state in place.");
    py::class_<Optimizer>(m, "Optimizer", "Steps of SHARP.")
        .def(py::init<const std::string&, const std::string&, const std::vector<py::dict>&, const std::string&>(),
             py::arg("parameter_format"), py::arg("state_format"), py::arg("parameters"), py::arg("isa") = "")
        .def_property_readonly("workspace", &Optimizer::workspace, "Bytes that a step needs.")
        .def("step", &Optimizer::step, "One step, unless it is to be skipped.");
    py::class_<Recorder>(m, "Recorder", "Stores steps of a rollout, rounded.")
        .def(py::init<const std::string&, const std::string&, std::vector<py::object>>())
        .def("record", &Recorder::record, "Store one step of all environments.");
    py::class_<PolicyActor>(m, "Actor", "Acts for a policy whose parameters it reads where they are.")
        .def(py::init<const std::string&, const py::dict&>())
        .def("act", &PolicyActor::act, "Act in all environments; draws are the caller's.");
}
