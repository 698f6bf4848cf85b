// sb3_fp16._cpu: one call runs a whole PPO update. Arguments are addresses and sizes; the caller keeps them alive.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "plan.h"

namespace py = pybind11;
using namespace sb3_fp16;

namespace {

using Update = Stats (*)(const Plan&, const Rollout&, const Settings&, const int64_t*, Scale&, Interrupted);

bool supports(const std::string& isa) {
#if defined(__x86_64__)
    if (isa == "avx512") return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c");
    if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    return isa == "portable";
}

Update update_of(const std::string& isa) {
    if (!supports(isa)) throw std::invalid_argument("this processor does not support " + isa);
#if defined(__x86_64__)
    if (isa == "avx512") return update_avx512;
    if (isa == "avx2") return update_avx2;
#endif
    return update_portable;
}

const Functions& functions_of(const std::string& isa) {
    update_of(isa);  // refuses what the processor does not support
#if defined(__x86_64__)
    if (isa == "avx512") return functions_avx512;
    if (isa == "avx2") return functions_avx2;
#endif
    return functions_portable;
}

using Single = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Half = py::array_t<uint16_t, py::array::c_style | py::array::forcecast>;

Half to_half(const std::string& isa, const Single& values) {
    Half result(values.size());
    functions_of(isa).pack(values.data(), result.mutable_data(), values.size());
    return result;
}

Single to_float(const std::string& isa, const Half& values) {
    Single result(values.size());
    functions_of(isa).unpack(values.data(), result.mutable_data(), values.size());
    return result;
}

Single elementwise(const std::string& isa, const std::string& name, const Single& values) {
    const Functions& f = functions_of(isa);
    Single result(values.size());
    (name == "tanh" ? f.tanh : name == "exp" ? f.exp : f.expm1)(values.data(), result.mutable_data(), values.size());
    return result;
}

template <class T>
T* pointer(const py::handle& address) {
    return reinterpret_cast<T*>(address.cast<uintptr_t>());
}

Sharing sharing_of(const std::string& name) {
    return name == "elementwise" ? Sharing::elementwise : name == "row" ? Sharing::row : Sharing::rank1;
}

Rounding rounding_of(const std::string& name) {
    if (name == "stochastic") return Rounding::stochastic;
    if (name == "dithered") return Rounding::dithered;
    if (name == "residual") return Rounding::residual;
    if (name == "swallowed") return Rounding::swallowed;
    return name == "fp32" ? Rounding::fp32 : Rounding::nearest;
}

Parameter parameter_of(const py::dict& given, bool half) {
    Parameter p{};
    p.data = pointer<void>(given["data"]);
    p.first_moment = pointer<void>(given["first_moment"]);
    p.root_second_moment = pointer<void>(given["second_moment"]);
    p.carry = pointer<float>(given["carry"]);
    (half ? reinterpret_cast<void*&>(p.step) : reinterpret_cast<void*&>(p.adam_step)) = pointer<void>(given["step"]);
    p.rows = given["rows"].cast<int64_t>(), p.columns = given["columns"].cast<int64_t>();
    p.first_element = static_cast<uint32_t>(given["first_element"].cast<uint64_t>());
    p.network = given["network"].cast<int>();
    p.sharing = sharing_of(given["sharing"].cast<std::string>());
    p.writeback = rounding_of(given["writeback"].cast<std::string>());
    return p;
}

Network network_of(const py::list& layers) {
    Network network;
    for (const py::handle& layer : layers) {
        const auto [weight, bias, inputs, outputs] = layer.cast<std::tuple<int, int, int, int>>();
        network.layers.push_back({weight, bias, inputs, outputs});
    }
    return network;
}

py::dict update(const std::string& isa, const py::dict& plan_, const py::dict& rollout_, const py::dict& settings_,
                py::array_t<int64_t, py::array::c_style> order, py::array_t<float, py::array::c_style> scales,
                py::array_t<int64_t, py::array::c_style> counters) {
    Plan plan;
    plan.half = plan_["half"].cast<bool>(), plan.log_std = plan_["log_std"].cast<int>();
    for (const py::handle& p : plan_["parameters"]) plan.parameters.push_back(parameter_of(p.cast<py::dict>(), plan.half));
    plan.policy = network_of(plan_["policy"].cast<py::list>()), plan.value = network_of(plan_["value"].cast<py::list>());

    Rollout rollout{};
    rollout.observations = pointer<void>(rollout_["observations"]), rollout.actions = pointer<void>(rollout_["actions"]);
    rollout.values = pointer<void>(rollout_["values"]), rollout.advantages = pointer<void>(rollout_["advantages"]);
    rollout.returns = pointer<void>(rollout_["returns"]), rollout.mean = pointer<void>(rollout_["mean"]);
    rollout.log_std = pointer<void>(rollout_["log_std"]), rollout.correction = pointer<void>(rollout_["correction"]);
    rollout.old_log_prob = pointer<float>(rollout_["old_log_prob"]);
    rollout.observation_size = rollout_["observation_size"].cast<int64_t>();
    rollout.action_size = rollout_["action_size"].cast<int64_t>();

    const auto number = [&](const char* name) { return settings_[name].cast<double>(); };
    Settings settings{};
    settings.samples = settings_["samples"].cast<int64_t>(), settings.batch_size = settings_["batch_size"].cast<int64_t>();
    settings.n_epochs = settings_["n_epochs"].cast<int64_t>();
    settings.clip_lower = static_cast<float>(number("clip_lower")), settings.clip_upper = static_cast<float>(number("clip_upper"));
    settings.clip_range_vf = static_cast<float>(number("clip_range_vf"));
    settings.normalize_advantage = settings_["normalize_advantage"].cast<bool>();
    settings.ent_coef = static_cast<float>(number("ent_coef")), settings.vf_coef = static_cast<float>(number("vf_coef"));
    settings.max_grad_norm = static_cast<float>(number("max_grad_norm")), settings.target_kl = static_cast<float>(number("target_kl"));
    settings.lr = number("lr"), settings.beta1 = number("beta1"), settings.beta2 = number("beta2"), settings.eps = number("eps");
    settings.weight_decay = number("weight_decay"), settings.state_scale = number("state_scale");
    settings.decoupled_weight_decay = settings_["decoupled_weight_decay"].cast<bool>();
    settings.root_rounding = rounding_of(settings_["root_rounding"].cast<std::string>());
    settings.seed = static_cast<uint32_t>(settings_["seed"].cast<uint64_t>());
    for (int k = 0; k < 2; ++k) {
        settings.scale_floor[k] = settings_["scale_floor"].cast<std::vector<float>>()[static_cast<size_t>(k)];
        settings.scale_ceiling[k] = settings_["scale_ceiling"].cast<std::vector<float>>()[static_cast<size_t>(k)];
    }
    if (order.size() != settings.samples * settings.n_epochs || scales.size() != 2 || counters.size() != 3)
        throw std::invalid_argument("order, scales or counters have the wrong size");

    float* s = scales.mutable_data();
    int64_t* c = counters.mutable_data();
    Scale scale{{s[0], s[1]}, c[0], c[1], c[2]};
    const Update run = update_of(isa);
    const int64_t* rows = order.data();
    Stats stats;
    {
        py::gil_scoped_release release;
        stats = run(plan, rollout, settings, rows, scale, [] {
            py::gil_scoped_acquire acquire;
            return PyErr_CheckSignals() != 0;
        });
    }
    s[0] = scale.scales[0], s[1] = scale.scales[1];
    c[0] = scale.good_steps, c[1] = scale.skipped_steps, c[2] = scale.skips_at_floor;
    if (PyErr_Occurred()) throw py::error_already_set();

    py::dict result;
    result["entropy_loss"] = stats.entropy_loss, result["policy_loss"] = stats.policy_loss;
    result["value_loss"] = stats.value_loss, result["approx_kl"] = stats.approx_kl;
    result["clip_fraction"] = stats.clip_fraction, result["loss"] = stats.loss, result["grad_norm"] = stats.grad_norm;
    result["nonzero"] = stats.nonzero, result["stuck"] = stats.stuck, result["saturated"] = stats.saturated;
    result["epochs"] = stats.epochs;
    result["stopped_at_kl"] = stats.stopped ? py::object(py::float_(stats.stopped_at_kl)) : py::object(py::none());
    return result;
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    m.doc() = "PPO updates of MLP policies in one native call.";
    m.def("supports", &supports, "Whether this processor runs an instruction set.");
    m.def("to_half", &to_half, "FP16 words of FP32 values.");
    m.def("to_float", &to_float, "FP32 values of FP16 words.");
    m.def("elementwise", &elementwise, "tanh, exp or expm1 of FP32 values, as the engine computes them.");
    m.def("update", &update, "Run all epochs on a rollout; trains parameters and optimizer state in place.");
}
