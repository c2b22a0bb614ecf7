//! With every configuration, all replicas are the same bits after many steps.

use crate::common::{device, floats, run, samples, steps};
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use phalanx::join::JoinOptions;
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::{Compressed, PowerSgd, PowerSgdOptions};
use phalanx::{ProcessGroup, Result};
use phalanx_burn::{Ddp, DdpOptions, ZeroRedundancyOptimizer};

/// Dense layers with a batch norm between them, and a branch that not every step takes.
#[derive(Module, Debug)]
struct Model {
    first: Linear,
    norm: BatchNorm,
    branch: Linear,
    last: Linear,
}

impl Model {
    fn new() -> Self {
        let layer = |from, to| LinearConfig::new(from, to).init(&device());
        Self {
            first: layer(8, 12),
            norm: BatchNormConfig::new(12).init(&device()),
            branch: layer(12, 12),
            last: layer(12, 3),
        }
    }

    fn loss(&self, (x, y): (Tensor<2>, Tensor<2>), branch: bool) -> Tensor<1> {
        let x = self.norm.forward(self.first.forward(x)).tanh();
        let x = if branch { x.clone() + self.branch.forward(x).tanh() } else { x };
        (self.last.forward(x) - y).powi_scalar(2).mean()
    }
}

/// What differs between configurations.
#[derive(Clone, Copy, Debug, Default)]
struct Configuration {
    adamw: bool,
    find_unused: bool,
    static_graph: bool,
    micro: usize,
    clip: bool,
    view: bool,
    local_buffers: bool,
    uneven: bool,
    zero: bool,
    hook: Option<Hook>,
}

#[derive(Clone, Copy, Debug)]
enum Hook {
    F16,
    Bf16,
    PowerSgd,
}

impl Configuration {
    fn options(self) -> DdpOptions {
        let mut options = DdpOptions::default();
        options.reducer = ReducerOptions::default()
            .bucket_cap_mb(0.0006)
            .find_unused_parameters(self.find_unused)
            .static_graph(self.static_graph);
        options.gradient_as_bucket_view = self.view;
        options.broadcast_buffers = !self.local_buffers;
        options
    }

    fn optimizer(self) -> ModuleOptimizer {
        if self.adamw {
            AdamWConfig::new().init()
        } else {
            SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
        }
    }

    fn register(self, ddp: &mut Ddp<Model>) -> Result<()> {
        match self.hook {
            None => Ok(()),
            Some(Hook::F16) => ddp.register_comm_hook(Compressed::f16()),
            Some(Hook::Bf16) => ddp.register_comm_hook(Compressed::bf16()),
            Some(Hook::PowerSgd) => {
                ddp.register_comm_hook(PowerSgd::new(PowerSgdOptions::default().start_iter(5))?)
            }
        }
    }

    /// Whether this rank takes the branch in this step.
    fn branch(self, step: usize, rank: usize) -> bool {
        match (self.find_unused, self.static_graph) {
            (_, true) => rank != 0,
            (true, _) => !(step + rank).is_multiple_of(3) && !step.is_multiple_of(5),
            _ => true,
        }
    }

    fn train(self, start: &Model, group: &ProcessGroup) -> Result<Vec<Vec<f32>>> {
        let mut ddp = Ddp::with_options(start.clone(), group, self.options())?;
        self.register(&mut ddp)?;
        let mut optimizer = self.optimizer();
        let mut zero = match self.zero {
            true => Some(ZeroRedundancyOptimizer::new(self.optimizer(), &mut ddp)?),
            false => None,
        };
        let rank = group.rank().index();
        // With twenty configurations and two to four ranks, 100 steps are more than 20,000 passes.
        let (all, less) = (steps(100, 10), steps(7, 1));
        let steps = if self.uneven { all - less * rank } else { all };
        ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
            for step in 0..steps {
                for part in 0..self.micro.max(1) {
                    let from = ((step * 4 + rank) * 3 + part) * 4;
                    let branch = self.branch(step, rank);
                    let loss = ddp.forward(|model| model.loss(samples(from, from + 4), branch))?;
                    if part + 1 < self.micro {
                        ddp.backward_no_sync(&loss)?;
                        continue;
                    }
                    let mut gradients = ddp.backward(&loss)?;
                    if self.clip {
                        ddp.clip_grad_norm(&mut gradients, 0.1)?;
                    }
                    match &mut zero {
                        Some(zero) => zero.step(ddp, 0.01, gradients)?,
                        None => ddp.step(optimizer, 0.01, gradients)?,
                    }
                }
            }
            Ok(())
        })?;
        assert!(ddp.replicas_identical()?, "{self:?}");
        let mut weights = floats(ddp.model());
        weights.retain(|values| values.iter().all(|x| x.is_finite()));
        assert_eq!(weights.len(), floats(start).len(), "{self:?}: something is not finite");
        // Running statistics are each rank's own until the next forward pass.
        let buffers =
            [floats(&ddp.model().norm.running_mean), floats(&ddp.model().norm.running_var)].concat();
        weights.retain(|values| !buffers.contains(values));
        Ok(weights)
    }
}

#[test]
fn replicas_are_the_same_bits_after_many_steps_of_every_configuration() {
    let plain = Configuration::default();
    let configurations = [
        plain,
        Configuration { adamw: true, ..plain },
        Configuration { find_unused: true, ..plain },
        Configuration { static_graph: true, adamw: true, ..plain },
        Configuration { micro: 3, ..plain },
        Configuration { clip: true, ..plain },
        Configuration { view: true, adamw: true, ..plain },
        Configuration { local_buffers: true, ..plain },
        Configuration { uneven: true, ..plain },
        Configuration { uneven: true, find_unused: true, adamw: true, micro: 2, ..plain },
        Configuration { uneven: true, static_graph: true, view: true, ..plain },
        Configuration { uneven: true, hook: Some(Hook::PowerSgd), ..plain },
        Configuration { zero: true, adamw: true, ..plain },
        Configuration { zero: true, find_unused: true, clip: true, view: true, ..plain },
        Configuration { zero: true, micro: 2, static_graph: true, ..plain },
        Configuration { zero: true, hook: Some(Hook::PowerSgd), clip: true, ..plain },
        Configuration { hook: Some(Hook::F16), ..plain },
        Configuration { hook: Some(Hook::Bf16), micro: 2, adamw: true, ..plain },
        Configuration { hook: Some(Hook::PowerSgd), view: true, ..plain },
        Configuration { hook: Some(Hook::PowerSgd), find_unused: true, clip: true, adamw: true, ..plain },
    ];
    let start = Model::new();
    for configuration in configurations {
        for ranks in [2, 3, 4] {
            let trained = run(ranks, |group| configuration.train(&start, &group).unwrap());
            assert!(trained.iter().all(|ours| *ours == trained[0]), "{ranks} ranks: {configuration:?}");
        }
    }
}
