// sb3_fp16._cuda: addresses and settings from Python to the kernels. It is not linked to torch, and its import needs no
// driver.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <string>

#include "launch.h"

namespace py = pybind11;

namespace {
using namespace sb3_fp16;

template <class Enum>
Enum named(const py::dict& dict, const char* key, const std::vector<std::string>& names) {
    const std::string name = dict[key].cast<std::string>();
    for (size_t i = 0; i < names.size(); ++i)
        if (name == names[i]) return static_cast<Enum>(i);
    throw std::invalid_argument(std::string(key) + " is unknown: " + name);
}

template <class T>
T* address(const py::dict& dict, const char* key) {
    return reinterpret_cast<T*>(dict[key].cast<uintptr_t>());
}

Storage storage_of(const py::dict& dict, const char* key) { return named<Storage>(dict, key, {"fp32", "fp16", "bf16"}); }

Slice slice_of(const py::dict& entry) {
    Slice slice{};
    slice.data = address<void>(entry, "data"), slice.first_moment = address<void>(entry, "first_moment");
    slice.root = address<void>(entry, "root_second_moment"), slice.carry = address<float>(entry, "carry");
    slice.step = address<int64_t>(entry, "step");
    slice.rows = entry["rows"].cast<int64_t>(), slice.columns = entry["columns"].cast<int64_t>();
    slice.first_element = entry["first_element"].cast<uint32_t>(), slice.coefficient = entry["coefficient"].cast<int32_t>();
    slice.sharing = named<Sharing>(entry, "sharing", {"elementwise", "row", "rank1"});
    slice.writeback = named<Rounding>(entry, "writeback", {"nearest", "stochastic", "dithered", "residual", "swallowed"});
    if (slice.rows < 1 || slice.columns < 1) throw std::invalid_argument("a parameter has no elements");
    if (slice.rows * slice.columns > INT64_C(0x100000000)) throw std::invalid_argument("a parameter has more than 2^32 elements");
    return slice;
}

SharpSettings settings_of(const py::dict& dict) {
    const double beta1 = dict["beta1"].cast<double>(), beta2 = dict["beta2"].cast<double>(), scale = dict["state_scale"].cast<double>();
    SharpSettings settings{};
    settings.coefficients = address<float>(dict, "coefficients"), settings.lr = address<float>(dict, "lr");
    settings.skip = address<bool>(dict, "skip"), settings.counts = address<unsigned long long>(dict, "counts");
    settings.unbias_first = address<float>(dict, "unbias_first"), settings.unbias_root = address<float>(dict, "unbias_root");
    settings.unbias_steps = dict["unbias_steps"].cast<int64_t>();
    settings.beta1 = static_cast<float>(beta1), settings.blend = static_cast<float>((1 - beta1) * scale);
    settings.beta2 = static_cast<float>(beta2), settings.rest = static_cast<float>(1 - beta2);
    settings.scale = static_cast<float>(scale), settings.eps = static_cast<float>(scale * dict["eps"].cast<double>());
    settings.weight_decay = dict["weight_decay"].cast<float>();
    settings.decoupled_weight_decay = dict["decoupled_weight_decay"].cast<bool>();
    settings.root_rounding = named<Rounding>(dict, "root_rounding", {"nearest", "stochastic", "dithered", "residual", "swallowed", "fp32"});
    settings.seed = dict["seed"].cast<uint32_t>();
    settings.parameter_bits = dict["parameter_bits"].cast<int>(), settings.state_bits = dict["state_bits"].cast<int>();
    return settings;
}

NormSettings norm_of(const py::dict& dict) {
    NormSettings norm{};
    norm.scales = address<float>(dict, "scales"), norm.coefficients = address<float>(dict, "coefficients");
    norm.norm = address<float>(dict, "norm"), norm.skip = address<bool>(dict, "skip");
    norm.stopped = address<bool>(dict, "stopped"), norm.counters = address<long long>(dict, "counters");
    norm.max_norm = dict["max_norm"].cast<float>();
    const auto floors = dict["floor"].cast<std::vector<float>>(), ceilings = dict["ceiling"].cast<std::vector<float>>();
    norm.networks = static_cast<int>(floors.size());
    if (floors.empty() || floors.size() > 2 || ceilings.size() != floors.size()) throw std::invalid_argument("one or two networks are served");
    for (size_t k = 0; k < floors.size(); ++k) norm.floor[k] = floors[k], norm.ceiling[k] = ceilings[k];
    return norm;
}

Where where_of(int device, uintptr_t stream) { return {device, reinterpret_cast<void*>(stream)}; }

// Steps of SHARP, or of Adam where moments are FP32, over parameters whose memory stays where it is; gradients may move.
class Optimizer {
public:
    // `parameters`: those of one network after another.
    Optimizer(const std::string& parameter_format, const std::string& state_format, const std::vector<py::dict>& parameters) {
        py::dict formats;
        formats["parameter_format"] = parameter_format, formats["state_format"] = state_format;
        plan.parameters = storage_of(formats, "parameter_format"), plan.state = storage_of(formats, "state_format");
        for (const py::dict& entry : parameters) plan.slices.push_back(slice_of(entry));
        bytes = plan.lay_out(nullptr);
    }

    int64_t workspace() const { return bytes; }

    // `norm`: what the norm and κ are computed with, or None where `settings` says where κ is.
    void step(int device, uintptr_t stream, uintptr_t workspace, const std::vector<uintptr_t>& gradients, const py::dict& settings,
              const py::object& norm) {
        if (gradients.size() != plan.slices.size()) throw std::invalid_argument("one gradient per parameter is needed");
        plan.lay_out(reinterpret_cast<char*>(workspace));
        for (size_t i = 0; i < gradients.size(); ++i) plan.slices[i].gradient = reinterpret_cast<const void*>(gradients[i]);
        const Where where = where_of(device, stream);
        if (norm.is_none()) return optimizer_step(where, plan, settings_of(settings), nullptr);
        NormSettings with_norm = norm_of(norm.cast<py::dict>());
        plan.find_partials(with_norm);
        optimizer_step(where, plan, settings_of(settings), &with_norm);
    }

private:
    StepPlan plan;
    int64_t bytes;
};

void gather_from(int device, uintptr_t stream, int word_bytes, uintptr_t in, uintptr_t indices, uintptr_t out, int64_t count, int64_t size) {
    if (word_bytes != 2 && word_bytes != 4) throw std::invalid_argument("words have 2 or 4 bytes");
    gather(where_of(device, stream), word_bytes, reinterpret_cast<const void*>(in), reinterpret_cast<const int64_t*>(indices),
           reinterpret_cast<void*>(out), count, size);
}

void statistics_from(int device, uintptr_t stream, const py::dict& dict) {
    StatisticsSettings settings{};
    settings.advantages = address<void>(dict, "advantages"), settings.indices = address<int64_t>(dict, "indices");
    settings.statistics = address<Statistics>(dict, "statistics");
    settings.samples = dict["samples"].cast<int64_t>(), settings.batch_size = dict["batch_size"].cast<int64_t>();
    settings.epochs = dict["epochs"].cast<int64_t>(), settings.normalize = dict["normalize"].cast<bool>();
    settings.significand_bits = dict["storage_bits"].cast<int>();
    if (settings.samples < 1 || settings.batch_size < 1) throw std::invalid_argument("a minibatch has no samples");
    statistics(where_of(device, stream), storage_of(dict, "storage"), settings);
}

void gae_from(int device, uintptr_t stream, const py::dict& dict) {
    GaeSettings settings{};
    settings.rewards = address<void>(dict, "rewards"), settings.values = address<void>(dict, "values");
    settings.episode_starts = address<uint8_t>(dict, "episode_starts");
    settings.advantages = address<void>(dict, "advantages"), settings.returns = address<void>(dict, "returns");
    settings.last_values = address<float>(dict, "last_values"), settings.last_continues = address<float>(dict, "last_continues");
    settings.saturated = address<unsigned long long>(dict, "saturated");
    settings.steps = dict["steps"].cast<int64_t>(), settings.envs = dict["envs"].cast<int64_t>();
    const double gamma = dict["gamma"].cast<double>();
    settings.gamma = static_cast<float>(gamma), settings.decay = static_cast<float>(gamma * dict["gae_lambda"].cast<double>());
    settings.significand_bits = dict["storage_bits"].cast<int>();
    gae(where_of(device, stream), storage_of(dict, "storage"), settings);
}

void losses_from(int device, uintptr_t stream, const py::dict& dict) {
    LossSettings settings{};
    settings.indices = address<int64_t>(dict, "indices"), settings.count = dict["count"].cast<int64_t>();
    settings.actions = address<void>(dict, "actions"), settings.advantages = address<void>(dict, "advantages");
    settings.returns = address<void>(dict, "returns"), settings.values = address<void>(dict, "values");
    settings.behaviour = address<void>(dict, "behaviour"), settings.correction = address<void>(dict, "correction");
    settings.old_log_prob = address<float>(dict, "old_log_prob"), settings.statistics = address<Statistics>(dict, "statistics");
    settings.outputs = address<void>(dict, "outputs"), settings.predictions = address<void>(dict, "predictions");
    settings.policy_signal = address<void>(dict, "policy_signal"), settings.value_signal = address<void>(dict, "value_signal");
    settings.size = dict["size"].cast<int64_t>();
    settings.log_std = address<void>(dict, "log_std"), settings.log_std0 = address<void>(dict, "log_std0");
    settings.log_std_gradient = address<void>(dict, "log_std_gradient"), settings.workspace = address<void>(dict, "workspace");
    settings.choices = address<int64_t>(dict, "choices"), settings.heads = dict["heads"].cast<int64_t>();
    settings.scales = address<float>(dict, "scales"), settings.logs = address<float>(dict, "logs");
    settings.stopped = address<bool>(dict, "stopped"), settings.networks = dict["networks"].cast<int>();
    settings.log_ratio = named<LogRatio>(dict, "log_ratio", {"absolute", "residual", "two_sum"});
    settings.clip = address<Clip>(dict, "clip");
    settings.ent_coef = dict["ent_coef"].cast<float>(), settings.vf_coef = dict["vf_coef"].cast<float>();
    settings.target_kl = dict["target_kl"].cast<float>();
    settings.storage_bits = dict["storage_bits"].cast<int>(), settings.compute_bits = dict["compute_bits"].cast<int>();
    if (settings.count < 1 || settings.size < 1) throw std::invalid_argument("a minibatch has no samples or no outputs");
    losses(where_of(device, stream), named<Head>(dict, "head", {"gaussian", "categorical", "bernoulli"}), storage_of(dict, "storage"),
           storage_of(dict, "compute"), settings);
}

}  // namespace

PYBIND11_MODULE(SB3_FP16_CUDA_MODULE, m) {
    m.doc() = "Kernels of a PPO update on a CUDA device.";
    m.attr("OPTIMIZER_FORMATS") = std::vector<std::pair<std::string, std::string>>{
        {"fp16", "fp16"}, {"bf16", "bf16"}, {"fp32", "fp16"}, {"fp32", "bf16"}};
    m.def("device_count", &device_count, "Devices that can be used; 0 without a driver.");
    m.def("gather", &gather_from, "Rows of an array by index.");
    m.def("statistics", &statistics_from, "Mean and deviation of the advantages of every minibatch.");
    m.def("gae", &gae_from, "Fill advantages and returns of a rollout.");
    m.def("loss_workspace", &loss_workspace, "Bytes that `losses` needs.");
    m.def("losses", &losses_from, "Losses of a minibatch and their gradients.");
    py::class_<Optimizer>(m, "Optimizer", "Steps of SHARP, or of Adam where moments are FP32.")
        .def(py::init<const std::string&, const std::string&, const std::vector<py::dict>&>())
        .def_property_readonly("workspace", &Optimizer::workspace, "Bytes that a step needs.")
        .def("step", &Optimizer::step, "Enqueue one step on a stream.");
}
