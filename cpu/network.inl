// An MLP of the policy: its tiles, its activations, forwards and backwards.
//
// Weights live in FP32 tiles that hold numbers of the compute format. Activations and backward signals are FP32 numbers
// rounded to it where the reference engine rounds them.

using Floats = std::vector<float>;

static Floats zeros(int64_t count) { return Floats(static_cast<size_t>(count), 0.0f); }

constexpr int64_t NARROW = 3;  // layers with so few outputs are summed along their inputs

// A layer's workspace; what follows `weight` belongs to training.
struct LayerSpace {
    Layer shape;
    int64_t in_stride, out_stride;
    Floats transposed;       // [in][out], for the forward pass
    Floats bias;
    Floats output;           // [batch][out], after the activation
    Floats before;           // [batch][out], before it, where its derivative needs that
    Floats weight;           // [out][in], for the signal to the layer below
    Floats signal;           // [batch][out], gradient of the output, then of the product
    Floats weight_gradient;  // [out][in]
    Floats bias_gradient;
    Floats turned;           // [in][out], of the weight gradient, where that needs less padding
};

struct NetworkSpace {
    std::vector<LayerSpace> layers;
    LayerSpace& head() { return layers.back(); }
};

template <class T>
SB3_FP16_LANE T activated(Activation kind, float slope, T x) {
    switch (kind) {
        case Activation::tanh: return tangent(x);
        case Activation::relu: return select(x <= 0.0f, T{}, x);  // NaN stays NaN
        case Activation::leaky_relu: return select(x > 0.0f, x, x * slope);
        case Activation::elu: return select(x > 0.0f, x, exponential_minus_1(x) * slope);
        case Activation::silu: return x * logistic(x);
        case Activation::gelu: return x * 0.5f * (1.0f + error_function(x * 0.707106781f));
        case Activation::gelu_tanh: return x * 0.5f * (1.0f + tangent(0.797884561f * (x + 0.044715f * x * x * x)));
        default: return x;
    }
}

// dy/dx from y, and from x where y does not tell.
template <class T>
SB3_FP16_LANE T derivative(Activation kind, float slope, T x, T y) {
    switch (kind) {
        case Activation::tanh: return 1.0f - y * y;
        case Activation::relu: return select(y > 0.0f, T{} + 1.0f, T{});
        case Activation::leaky_relu: return select(x > 0.0f, T{} + 1.0f, T{} + slope);
        case Activation::elu: return select(x > 0.0f, T{} + 1.0f, exponential(x) * slope);
        case Activation::silu: {
            const T s = logistic(x);
            return s * (1.0f + x * (1.0f - s));
        }
        case Activation::gelu: {
            const T density = exponential(x * x * -0.5f) * 0.398942280f;
            return 0.5f * (1.0f + error_function(x * 0.707106781f)) + x * density;
        }
        case Activation::gelu_tanh: {
            const T t = tangent(0.797884561f * (x + 0.044715f * x * x * x));
            return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * (0.797884561f * (1.0f + 3 * 0.044715f * x * x));
        }
        default: return T{} + 1.0f;
    }
}

SB3_FP16_LANE bool needs_before(Activation kind) {
    return kind != Activation::none && kind != Activation::tanh && kind != Activation::relu;
}

// Numbers are stored as S and computed with as C.
template <class S, class C>
struct Model {
    const Plan plan;
    const S storage;
    const C compute;
    Workers workers;
    NetworkSpace policy, value;
    int64_t batch;
    int64_t observation_size, input_stride;
    Floats input;  // [batch][in], in the compute format
    Floats log_std;
    Floats turning;

    Model(const Plan& plan_, int64_t batch_, bool trains)
        : plan(plan_), storage(plan.significand_bits), compute(plan.significand_bits), workers(trains ? plan.threads : 1), batch(batch_),
          observation_size(plan.policy.front().inputs), input_stride(spaced(observation_size)) {
        input = zeros(batch * input_stride);
        reserve(policy, plan.policy, trains), reserve(value, plan.value, trains);
        if (plan.log_std >= 0) log_std = zeros(padded(parameter(plan.log_std).columns));
    }

    int64_t outputs() const { return plan.policy.back().outputs; }
    int64_t action_size() const {
        return plan.head == Head::categorical ? static_cast<int64_t>(plan.choices.size()) : outputs();
    }

    const Parameter& parameter(int position) const { return plan.parameters[static_cast<size_t>(position)]; }

    void reserve(NetworkSpace& space, const Network& network, bool trains) {
        for (const Layer& shape : network) {
            LayerSpace layer{};
            layer.shape = shape, layer.in_stride = spaced(shape.inputs), layer.out_stride = spaced(shape.outputs);
            const bool turns = shape.outputs * padded(shape.inputs) > shape.inputs * padded(shape.outputs);
            // No product reads this tile: its rows need no padding, and an optimizer step takes them as one.
            const bool is_dense = trains && turns && space.layers.empty() && shape.outputs > NARROW;
            if (is_dense) layer.in_stride = shape.inputs;
            layer.transposed = zeros(shape.inputs * layer.out_stride);
            layer.bias = zeros(layer.out_stride);
            layer.output = zeros(batch * layer.out_stride);
            // An actor turns weights in one place and keeps those that narrow layers read.
            if (trains || shape.outputs <= NARROW) layer.weight = zeros(shape.outputs * layer.in_stride + PAD);
            else turning.resize(std::max(turning.size(), static_cast<size_t>(shape.outputs * layer.in_stride + PAD)));
            if (trains) {
                if (needs_before(shape.activation) || C::keeps_unrounded) layer.before = zeros(batch * layer.out_stride);
                layer.signal = zeros(batch * layer.out_stride);
                layer.weight_gradient = zeros(shape.outputs * layer.in_stride + PAD);
                layer.bias_gradient = zeros(layer.out_stride);
                if (turns) layer.turned = zeros(shape.inputs * layer.out_stride);
            }
            space.layers.push_back(std::move(layer));
        }
    }

    // Numbers of storage as the compute format's copy of parameters has them; `index` is that of the first element.
    SB3_FP16_LANE Lane copy_of(const Model& m, Lane x, uint32_t index) {
        if (!C::rounds || S::rounds) return x;
        if (!m.plan.stochastic_copy) return m.compute.round(x);
        const Words keys = random_key(as_word(x), COPY_SALT, 0u);
        return m.compute.round(x, random_threshold(positions() + index, keys));
    }

    void read_row(const void* data, int64_t start, int64_t count, uint32_t index, float* row) const {
        for (int64_t c = 0; c < count; c += WIDTH)
            store_lane(row + c, copy_of(*this, storage.load(data, start + c, count - c), index + static_cast<uint32_t>(c)));
    }

    // Unpack all parameters into tiles.
    void refresh() {
        for (NetworkSpace* space : {&policy, &value})
            for (LayerSpace& layer : space->layers) {
                const Layer& s = layer.shape;
                float* weight = layer.weight.empty() ? turning.data() : layer.weight.data();
                for (int64_t o = 0; o < s.outputs; ++o)
                    read_row(parameter(s.weight).data, o * s.inputs, s.inputs, static_cast<uint32_t>(o * s.inputs),
                             weight + o * layer.in_stride);
                transpose(workers, weight, layer.in_stride, s.outputs, s.inputs, layer.transposed.data(), layer.out_stride);
                read_row(parameter(s.bias).data, 0, s.outputs, 0, layer.bias.data());
            }
        if (plan.log_std < 0) return;
        const Parameter& p = parameter(plan.log_std);
        for (int64_t j = 0; j < p.columns; j += WIDTH)
            store_lane(&log_std[static_cast<size_t>(j)], storage.load(p.data, j, p.columns - j));
    }

    void forward(NetworkSpace& space, int64_t count) {
        const float* x = input.data();
        int64_t x_stride = input_stride;
        for (LayerSpace& layer : space.layers) {
            Product product{{x, x_stride, 1}, layer.transposed.data(), layer.out_stride, layer.bias.data(),
                            layer.output.data(), layer.out_stride, count, layer.shape.inputs, padded(layer.shape.outputs)};
            if (layer.shape.outputs <= NARROW) {
                product.columns = layer.shape.outputs;
                multiply_narrow(compute, product, layer.weight.data(), layer.in_stride);
            } else {
                multiply(workers, compute, product);
            }
            activate(layer, count * layer.out_stride);
            x = layer.output.data(), x_stride = layer.out_stride;
        }
    }

    template <Activation KIND>
    void activate(LayerSpace& layer, int64_t n) {
        float* y = layer.output.data();
        float* before = layer.before.empty() ? nullptr : layer.before.data();
        for (int64_t i = 0; i < n; i += WIDTH) {
            const Lane x = load_lane(y + i);
            if (before) store_lane(before + i, x);
            store_lane(y + i, compute.round(activated(KIND, layer.shape.slope, x)));
        }
    }

    void activate(LayerSpace& layer, int64_t n) {
        switch (layer.shape.activation) {
            case Activation::none: return;
            case Activation::tanh: return activate<Activation::tanh>(layer, n);
            case Activation::relu: return activate<Activation::relu>(layer, n);
            case Activation::leaky_relu: return activate<Activation::leaky_relu>(layer, n);
            case Activation::elu: return activate<Activation::elu>(layer, n);
            case Activation::silu: return activate<Activation::silu>(layer, n);
            case Activation::gelu: return activate<Activation::gelu>(layer, n);
            case Activation::gelu_tanh: return activate<Activation::gelu_tanh>(layer, n);
        }
    }

    // The head's signal is the gradient of its output, rounded. Leaves rounded gradients of all parameters.
    void backward(NetworkSpace& space, int64_t count) {
        for (size_t l = space.layers.size(); l-- > 0;) {
            LayerSpace& layer = space.layers[l];
            differentiate(layer, count);
            const float* x = l ? space.layers[l - 1].output.data() : input.data();
            const int64_t x_stride = l ? space.layers[l - 1].out_stride : input_stride;
            weigh(layer, x, x_stride, count);
            if (l == 0) return;
            LayerSpace& below = space.layers[l - 1];
            multiply(workers, compute, {{layer.signal.data(), layer.out_stride, 1}, layer.weight.data(), layer.in_stride, nullptr,
                               below.signal.data(), below.out_stride, count, layer.shape.outputs, padded(below.shape.outputs)});
        }
    }

    // Gradient of the weights: signalᵀ·x, or xᵀ·signal turned around where padding would cost more.
    void weigh(LayerSpace& layer, const float* x, int64_t x_stride, int64_t count) {
        const Layer& s = layer.shape;
        if (layer.turned.empty()) {
            multiply(workers, compute, {{layer.signal.data(), 1, layer.out_stride}, x, x_stride, nullptr, layer.weight_gradient.data(),
                               layer.in_stride, s.outputs, count, padded(s.inputs)});
            return;
        }
        multiply(workers, compute, {{x, 1, x_stride}, layer.signal.data(), layer.out_stride, nullptr, layer.turned.data(),
                           layer.out_stride, s.inputs, count, padded(s.outputs)});
        transpose(workers, layer.turned.data(), layer.out_stride, s.inputs, s.outputs, layer.weight_gradient.data(), layer.in_stride);
    }

    // Gradient of the output to gradient of the product, and its sum over the batch.
    template <Activation KIND>
    void differentiate(LayerSpace& layer, int64_t count) {
        const int64_t stride = layer.out_stride;
        const float* before = layer.before.empty() ? layer.output.data() : layer.before.data();
        for (int64_t o = 0; o < stride; o += WIDTH) {
            Lane sum{};
            for (int64_t i = o; i < count * stride; i += stride) {
                Lane signal = load_lane(layer.signal.data() + i);
                if (KIND != Activation::none) {
                    const Lane x = load_lane(before + i);
                    const Lane y = C::keeps_unrounded ? activated(KIND, layer.shape.slope, x) : load_lane(layer.output.data() + i);
                    signal = compute.round(signal * derivative(KIND, layer.shape.slope, x, y));
                    store_lane(layer.signal.data() + i, signal);
                }
                sum = sum + signal;
            }
            store_lane(layer.bias_gradient.data() + o, compute.round(sum));
        }
    }

    void differentiate(LayerSpace& layer, int64_t count) {
        switch (layer.shape.activation) {
            case Activation::none: return differentiate<Activation::none>(layer, count);
            case Activation::tanh: return differentiate<Activation::tanh>(layer, count);
            case Activation::relu: return differentiate<Activation::relu>(layer, count);
            case Activation::leaky_relu: return differentiate<Activation::leaky_relu>(layer, count);
            case Activation::elu: return differentiate<Activation::elu>(layer, count);
            case Activation::silu: return differentiate<Activation::silu>(layer, count);
            case Activation::gelu: return differentiate<Activation::gelu>(layer, count);
            case Activation::gelu_tanh: return differentiate<Activation::gelu_tanh>(layer, count);
        }
    }
};
