//! A model that a plan of names divides is the undivided one.

use burn::module::{Lora, Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Int, Tensor};
use phalanx::ProcessGroup;
use phalanx::testing::{self, Fabric};
use phalanx_burn::parallel;
use phalanx_burn::parallel::tensor::{
    ColumnParallelLinear, ParallelLinear, TensorGroup, TensorPlan, VocabParallelEmbedding,
};

use super::model::{LENGTH, VOCABULARY, WIDTH, Waves, rows, scalar};
use crate::common::{device, distance, floats, run};

const HEADS: usize = 4;

/// A layer written for a plan: heads are counted by how wide a rank's part is.
#[derive(Module, Debug)]
struct Layer {
    query: ParallelLinear,
    key: ParallelLinear,
    value: ParallelLinear,
    output: ParallelLinear,
    inner: ParallelLinear,
    outer: ParallelLinear,
    norm: LayerNorm,
}

impl Layer {
    fn new() -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device()).into();
        Self {
            query: linear(WIDTH, WIDTH),
            key: linear(WIDTH, WIDTH),
            value: linear(WIDTH, WIDTH),
            output: linear(WIDTH, WIDTH),
            inner: linear(WIDTH, 4 * WIDTH),
            outer: linear(4 * WIDTH, WIDTH),
            norm: LayerNormConfig::new(WIDTH).init(&device()),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        let [query, key, value] =
            ParallelLinear::forward_each([&self.query, &self.key, &self.value], x.clone()).map(|y| {
                let heads = y.dims()[2] / (WIDTH / HEADS);
                y.reshape([batch, length, heads, WIDTH / HEADS]).swap_dims(1, 2)
            });
        let weights = softmax(query.matmul(key.transpose()) / ((WIDTH / HEADS) as f64).sqrt(), 3);
        let context = weights.matmul(value).swap_dims(1, 2);
        let [.., heads, side] = context.dims();
        let x = self.norm.forward(x + self.output.forward(context.reshape([batch, length, heads * side])));
        x.clone() + self.outer.forward(gelu(self.inner.forward(x)))
    }
}

/// A language model, whose decoder is the embedding, transposed; each token has a bias.
#[derive(Module, Debug)]
struct Model {
    tokens: VocabParallelEmbedding,
    layers: Vec<Layer>,
    bias: Param<Tensor<1>>,
}

impl Model {
    fn new() -> Self {
        let tokens: Embedding = EmbeddingConfig::new(VOCABULARY, WIDTH).init(&device());
        let bias = Param::from_tensor(Tensor::zeros([VOCABULARY], &device()));
        let layers = vec![Layer::new(), Layer::new()];
        Self { tokens: tokens.into(), layers, bias }.map(&mut Waves(0))
    }

    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let [batch, length] = tokens.dims();
        let x = self.layers.iter().fold(self.tokens.forward(tokens.clone()), |x, layer| layer.forward(x));
        let logits = self.tokens.logits(x.reshape([batch * length, WIDTH])) + self.bias.val().unsqueeze();
        self.tokens.cross_entropy(logits, tokens.reshape([batch * length]), Some(3))
    }

    /// This rank's part of rank 0's. Of the bias too, which is no layer.
    fn divided(self, group: &TensorGroup) -> phalanx::Result<Self> {
        let mut model = plan().divide(self, group)?;
        model.bias = group.shard(model.bias, 0)?;
        Ok(model)
    }
}

fn plan() -> TensorPlan {
    ["query", "key", "value", "inner"]
        .iter()
        .fold(TensorPlan::new().vocabulary("tokens"), |plan, layer| plan.column(&format!("layers.*.{layer}")))
        .row("layers.*.output")
        .row("layers.*.outer")
}

/// The model after a step with the norm of its gradients.
fn stepped(model: Model, tokens: Tensor<2, Int>, group: Option<&TensorGroup>) -> (Model, f64, f64) {
    let loss = model.loss(tokens);
    let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
    let norm = parallel::clip_grad_norm(&model, &mut gradients, 1e9, group, None, &[]).unwrap();
    (SgdConfig::new().init().step(1.0, model, gradients), scalar(&loss), norm)
}

#[test]
fn a_plan_changes_nothing_but_where_the_weights_are() {
    let (tokens, _) = rows(0, 3);
    let (whole, loss, norm) = stepped(Model::new(), tokens.clone(), None);
    let expected = floats(&whole);
    for (ranks, fabric) in
        [(1, Fabric::InProcess), (2, Fabric::InProcess), (4, Fabric::SharedMemory), (4, Fabric::Tcp)]
    {
        testing::run(ranks, fabric, |group| {
            let group = TensorGroup::new(&group);
            // Each rank makes weights of its own; rank 0's count.
            let model = Model::new().map(&mut Waves(17 * group.rank()));
            let model = model.divided(&group).unwrap();
            let ranks = ranks as usize;
            assert_eq!(model.layers[1].query.weight.dims(), [WIDTH, WIDTH / ranks]);
            assert_eq!(model.layers[1].query.bias.as_ref().unwrap().dims(), [WIDTH / ranks]);
            assert_eq!(model.layers[0].outer.weight.dims(), [4 * WIDTH / ranks, WIDTH]);
            assert_eq!(model.layers[0].outer.bias.as_ref().unwrap().dims(), [WIDTH]);
            // Divided parameters stay what they are on Burn's ways.
            let model = model.clone().no_grad().set_require_grad(true);
            let valid = model.clone().valid().loss(tokens.clone().inner());
            assert!((scalar(&valid) - loss).abs() < 1e-5, "{} {loss}", scalar(&valid));
            let (model, ours, ours_norm) = stepped(model, tokens.clone(), Some(&group));
            assert!((ours - loss).abs() < 1e-5, "{ours} {loss}");
            assert!((ours_norm / norm - 1.0).abs() < 1e-5, "{ours_norm} {norm}");
            let whole = group.gather_module(model).unwrap();
            let apart = distance(&floats(&whole), &expected);
            assert!(apart < 1e-5, "{ranks} ranks: {apart}");
            // It is whole, and may be divided again.
            whole.divided(&group).unwrap();
            assert!(group.failure().is_none());
        });
    }
}

#[test]
fn a_plan_that_does_not_fit_the_model_says_what_is_wrong() {
    let refused = |ranks: u32, plan: fn(usize) -> TensorPlan, cause: &str| {
        run(ranks, |group| {
            let group = TensorGroup::new(&group);
            let error = plan(group.rank()).divide(Model::new(), &group).unwrap_err().to_string();
            assert!(error.contains(cause), "{error}");
        });
    };
    refused(
        2,
        |_| TensorPlan::new().column("layers.*.querry"),
        "no layer of the module matches `layers.*.querry`",
    );
    refused(
        2,
        |_| TensorPlan::new().column("layers.*.norm"),
        "`layers.0.norm`, which is a LayerNorm and no ParallelLinear",
    );
    refused(
        2,
        |_| TensorPlan::new().vocabulary("layers.0.query"),
        "which is a ParallelLinear and no VocabParallelEmbedding",
    );
    refused(
        2,
        |_| TensorPlan::new().column("layers.*.query").row("layers.0.*"),
        "`layers.0.query` matches both `layers.*.query` and `layers.0.*`",
    );
    refused(
        3,
        |_| TensorPlan::new().column("layers.0.query"),
        "16 outputs of `layers.0.query` cannot be divided evenly among 3",
    );
    refused(
        3,
        |_| TensorPlan::new().row("layers.0.outer"),
        "64 inputs of `layers.0.outer` cannot be divided evenly among 3",
    );
    refused(
        2,
        |rank| TensorPlan::new().column(&format!("layers.{rank}.query")),
        "the ranks disagree on the plan: rank 0 has [(\"layers.0.query\", Column)]",
    );
    let group = TensorGroup::new(&ProcessGroup::alone().unwrap());
    let once = plan().divide(Model::new(), &group).unwrap();
    let error = plan().divide(once, &group).unwrap_err().to_string();
    assert!(error.contains("divided already"), "{error}");
    let (bias, few) = (
        Model::new().bias,
        run(2, |group| {
            let bias = Param::from_tensor(Tensor::<1>::zeros([1], &device()));
            TensorGroup::new(&group).shard(bias, 0).unwrap_err().to_string()
        }),
    );
    assert!(few[0].contains("shape [1] cannot be divided along dimension 0 among 2 ranks"), "{few:?}");
    assert!(group.shard(bias, 1).unwrap_err().to_string().contains("along dimension 1"));
}

#[test]
fn what_is_a_part_already_or_has_an_adapter_is_not_divided() {
    let group = TensorGroup::new(&ProcessGroup::alone().unwrap());
    let part = group.shard(Model::new().bias, 0).unwrap();
    let error = group.shard(part, 0).unwrap_err().to_string();
    assert!(error.contains("the reparameterization `division`"), "{error}");
    let layer =
        || -> Linear { LinearConfig::new(WIDTH, WIDTH).init(&device()).apply_lora(Lora::new(2, 4.0)) };
    let planned = vec![ParallelLinear::from(layer())];
    for error in [
        ColumnParallelLinear::new(layer(), &group).unwrap_err(),
        TensorPlan::new().column("*").divide(planned, &group).unwrap_err(),
    ] {
        assert!(error.to_string().contains("the reparameterization `lora`"), "{error}");
    }
}

#[test]
fn a_module_that_one_rank_cannot_divide_is_an_error_on_every_rank() {
    let errors = run(2, |group| {
        let group = TensorGroup::new(&group);
        let layer =
            || -> ParallelLinear { LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&device()).into() };
        let mut layers = vec![layer(), layer()];
        if group.rank() == 1 {
            // One id, and two values.
            let other = layers[1].weight.val().detach().require_grad();
            layers[1].weight = Param::initialized(layers[0].weight.id, other);
        }
        TensorPlan::new().column("*").divide(layers, &group).unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("one parameter has other values at `0.weight` than at `1.weight`"), "{text}");
    }
}

/// Burn's layer where the plan wants one that it can divide.
#[derive(Module, Debug)]
struct Fixed {
    layer: Linear,
}

#[test]
fn burn_s_layers_cannot_be_divided_by_name() {
    let group = TensorGroup::new(&ProcessGroup::alone().unwrap());
    let model = Fixed { layer: LinearConfig::new(LENGTH, 2).init(&device()) };
    let error = TensorPlan::new().column("layer").divide(model, &group).unwrap_err().to_string();
    assert!(error.contains("`layer`, which is a Linear and no ParallelLinear"), "{error}");
    assert!(error.contains("ParallelLinear::from(layer)"), "{error}");
}
