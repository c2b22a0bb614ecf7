//! Contrastive losses over the samples of all ranks, against one process with all samples.

use crate::common::{Mlp, Waves, device, distance, everywhere, floats, plain, run, samples};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor};
use phalanx::ReduceOp;
use phalanx::reducer::ReducerOptions;
use phalanx_burn::{Collectives, Ddp, DdpOptions};

const TEMPERATURE: f32 = 0.5;

/// Every parameter in a bucket of its own.
fn options() -> DdpOptions {
    let mut options = DdpOptions::default();
    options.reducer = ReducerOptions::default().bucket_cap_mb(0.0);
    options
}

/// Rows of length one.
fn unit(x: Tensor<2>) -> Tensor<2> {
    let length = x.clone().powi_scalar(2).sum_dim(1).sqrt();
    x / length
}

/// The mean cross-entropy of `scores`, whose row i should choose column `target(i)`.
fn cross_entropy(scores: Tensor<2>, target: impl Fn(usize) -> usize) -> Tensor<1> {
    let rows = scores.dims()[0];
    let targets: Vec<i64> = (0..rows).map(|row| target(row) as i64).collect();
    let targets = Tensor::<1, Int>::from_data(targets.as_slice(), &scores.device()).reshape([rows, 1]);
    log_softmax(scores, 1).gather(1, targets).mean().neg()
}

/// SimCLR's NT-Xent: each row's other view among all rows but itself. `z` are the rows of one rank, both views.
fn nt_xent(z: Tensor<2>, all: Tensor<2>, first: usize) -> Tensor<1> {
    let (own, total) = (z.dims()[0], all.dims()[0]);
    let itself: Vec<f32> = (0..own * total)
        .map(|place| if place % total == first + place / total { -1e9 } else { 0.0 })
        .collect();
    let itself = Tensor::<1>::from_data(itself.as_slice(), &z.device()).reshape([own, total]);
    let scores = z.matmul(all.transpose()) / TEMPERATURE + itself;
    cross_entropy(scores, |row| first + (row + own / 2) % own)
}

/// Both views of the samples `from..to`.
fn views(model: &Mlp, from: usize, to: usize) -> Tensor<2> {
    let (x, _) = samples(from, to);
    unit(model.forward(Tensor::cat(vec![x.clone() * 0.9, x * 1.1 + 0.05], 0)))
}

/// Two towers and a temperature that is learnt.
#[derive(Module, Debug)]
struct Clip {
    images: Mlp,
    texts: Mlp,
    scale: Param<Tensor<1>>,
}

impl Clip {
    fn new() -> Self {
        let scale = Param::from_tensor(Tensor::from_floats([0.7], &device()));
        let clip = Self { images: Mlp::new(&[8, 16, 5]), texts: Mlp::new(&[3, 12, 5]), scale };
        clip.map(&mut Waves::default())
    }

    fn features(&self, from: usize, to: usize) -> (Tensor<2>, Tensor<2>) {
        let (x, y) = samples(from, to);
        (unit(self.images.forward(x)), unit(self.texts.forward(y)))
    }

    /// The loss of a rank's rows, of which the first is row `first` among all.
    fn loss(&self, own: (Tensor<2>, Tensor<2>), all: (Tensor<2>, Tensor<2>), first: usize) -> Tensor<1> {
        let scale = self.scale.val().exp().reshape([1, 1]);
        let of = |own: Tensor<2>, all: Tensor<2>| {
            cross_entropy(own.matmul(all.transpose()) * scale.clone(), |row| first + row)
        };
        (of(own.0, all.1) + of(own.1, all.0)) / 2.0
    }
}

/// All gradients, in module order.
fn of_all<M: Module>(model: &M, gradients: &GradientsParams) -> Vec<Vec<f32>> {
    struct Read<'a>(&'a GradientsParams, Vec<Vec<f32>>);
    impl ModuleVisitor for Read<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.push(self.0.get::<D>(param.id).unwrap().into_data().iter::<f32>().collect());
        }
    }
    let mut read = Read(gradients, Vec::new());
    model.visit(&mut read);
    read.1
}

#[test]
fn simclr_s_loss_over_two_and_three_ranks_has_the_gradients_of_one_process() {
    const ROWS: usize = 4;
    everywhere(|group| {
        // Each rank's own: threads whose graphs have leaves in common would wait for each other in backward.
        let start = Mlp::new(&[8, 24, 16, 5]).map(&mut Waves::default());
        let (rank, ranks) = (group.rank().index(), group.world_size().count());
        let blocks: Vec<_> = (0..ranks).map(|rank| views(&start, rank * ROWS, (rank + 1) * ROWS)).collect();
        let all = Tensor::cat(blocks.clone(), 0);
        let losses = blocks.into_iter().enumerate().map(|(rank, z)| nt_xent(z, all.clone(), rank * 2 * ROWS));
        let mean = Tensor::cat(losses.collect(), 0).mean();
        let whole = of_all(&start, &GradientsParams::from_grads(mean.backward(), &start));

        let mut ddp = Ddp::with_options(start.clone(), &group, options()).unwrap();
        for _ in 0..4 {
            let loss = ddp.forward(|model| {
                let z = views(model, rank * ROWS, (rank + 1) * ROWS);
                Ok::<_, phalanx::Error>(nt_xent(z.clone(), z.all_gather(&group)?, rank * 2 * ROWS))
            });
            let gradients = ddp.backward(&loss.unwrap().unwrap()).unwrap();
            let distance = distance(&of_all(ddp.model(), &gradients), &whole);
            assert!(distance < 5e-6, "{ranks} ranks: {distance:e}");
        }
    });
}

#[test]
fn clip_s_towers_and_temperature_train_as_in_one_process() {
    const STEPS: usize = 4;
    everywhere(|group| {
        let start = Clip::new();
        // Unequal numbers of rows, and equal ones with plain backward.
        let (rank, ranks) = (group.rank().index(), group.world_size().count());
        for unequal in [false, true] {
            let rows = |rank: usize| if unequal { 2 + 3 * rank } else { 4 };
            let first = |rank: usize| (0..rank).map(rows).sum::<usize>();
            let total = first(ranks);
            let (mut model, mut alone) = (start.clone(), SgdConfig::new().init());
            let mut ddp = Ddp::with_options(start.clone(), &group, options()).unwrap();
            let mut optimizer = SgdConfig::new().init();
            for step in 0..STEPS {
                let base = step * 20;
                let all = model.features(base, base + total);
                let loss = model.loss(all.clone(), all, 0); // the mean over all rows
                let whole = GradientsParams::from_grads(loss.backward(), &model);

                let loss = ddp.forward(|model| {
                    let own = model.features(base + first(rank), base + first(rank + 1));
                    let all = (own.0.clone().all_gather(&group)?, own.1.clone().all_gather(&group)?);
                    Ok::<_, phalanx::Error>(model.loss(own, all, first(rank)))
                });
                let loss = loss.unwrap().unwrap();
                let gradients = match unequal {
                    true => ddp.backward_weighted(&loss, rows(rank) as f64),
                    false => ddp.backward(&loss),
                };
                let gradients = gradients.unwrap();
                if step == 0 {
                    let distance = distance(&of_all(ddp.model(), &gradients), &of_all(&model, &whole));
                    assert!(distance < 5e-6, "{ranks} ranks: {distance:e}");
                }
                ddp.step(&mut optimizer, 0.2, gradients).unwrap();
                model = alone.step(0.2, model, whole);
            }
            let distance = distance(&floats(ddp.model()), &floats(&model));
            assert!(distance < 1e-5, "{ranks} ranks: {distance:e}");
            assert!(ddp.replicas_identical().unwrap());
        }
    });
}

#[test]
fn rows_of_unequal_numbers_even_of_none_get_the_sum_of_all_ranks_gradients() {
    everywhere(|group| {
        let (rank, ranks) = (group.rank().index(), group.world_size().count());
        let weight = Tensor::<1>::from_floats([2.0, 3.0], &device()).require_grad();
        // Rank r has r rows of ones. Rank s multiplies row k of all by s + 1 + k.
        let own = Tensor::<2>::ones([rank, 2], &device()) * weight.clone().reshape([1, 2]);
        let all = own.all_gather(&group).unwrap();
        let total = ranks * (ranks - 1) / 2;
        assert_eq!(all.dims(), [total, 2]);
        assert_eq!(all.clone().into_data().try_to_vec::<f32>().unwrap(), [2.0, 3.0].repeat(total));
        let factors: Vec<f32> = (0..total).map(|row| (rank + 1 + row) as f32).collect();
        let factors = Tensor::<1>::from_data(factors.as_slice(), &device()).reshape([total, 1]);
        let gradients = (all * factors).sum().backward();
        // Own rows are k = r(r-1)/2 .. r(r-1)/2 + r; over all ranks s: Σ_s (s + 1 + k).
        let first = rank * rank.saturating_sub(1) / 2;
        let each = |row: usize| (0..ranks).map(|other| other + 1 + row).sum::<usize>();
        let expected = (first..first + rank).map(each).sum::<usize>() as f32;
        assert_eq!(weight.grad(&gradients).unwrap().into_data().try_to_vec::<f32>().unwrap(), [expected; 2]);
    });
}

#[test]
fn collectives_without_gradients_refuse_graphs_and_detached_rows_are_as_before() {
    run(2, |group| {
        let tracked = Tensor::<1>::ones([2], &device()).require_grad() * 3.0;
        let root = group.rank();
        let errors = [
            tracked.clone().all_reduce(&group, ReduceOp::Sum).unwrap_err(),
            tracked.clone().reduce(&group, root, ReduceOp::Sum).unwrap_err(),
            tracked.clone().broadcast(&group, root).unwrap_err(),
            tracked.clone().reduce_scatter(&group, ReduceOp::Sum).unwrap_err(),
        ];
        for error in errors {
            assert!(error.is_invalid_argument() && error.remedy().unwrap().contains("detach()"), "{error}");
        }
        let gathered = tracked.clone().detach().all_gather(&group).unwrap();
        assert!(!gathered.is_tracked() && gathered.device() == device());
        // Integers and floats without autodiff, too.
        assert_eq!(Tensor::<1, Int>::ones([2], &plain()).all_gather(&group).unwrap().dims(), [4]);
        assert!(tracked.all_gather(&group).unwrap().is_tracked());
    });
}

#[test]
fn ranks_whose_graphs_differ_get_an_error() {
    everywhere(|group| {
        let rows = Tensor::<2>::ones([2, 2], &device());
        let rows = if group.rank().is_main() { rows.require_grad() * 2.0 } else { rows };
        let error = rows.all_gather(&group).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("graph"), "{error}");
    });
    // One rank uses the gathered rows as constants: it has no exchange in backward.
    everywhere(|group| {
        let mut ddp = Ddp::with_options(Mlp::new(&[8, 6, 3]), &group, options()).unwrap();
        // A rank that is late hears of the others' backward passes in its forward pass.
        let mut late = None;
        let loss = ddp.forward(|model| {
            let rows = model.forward(samples(0, 3).0);
            let all = rows.clone().all_gather(&group).unwrap_or_else(|error| {
                late = Some(error);
                rows.clone()
            });
            let all = if group.rank().is_main() { all } else { all.detach() };
            rows.matmul(all.transpose()).mean()
        });
        let outcome = loss.and_then(|loss| ddp.backward(&loss)).map(drop);
        let error = late.map_or(outcome, Err).unwrap_err().to_string();
        assert!(error.contains("Collectives::all_gather") || error.contains("reduce_scatter"), "{error}");
    });
}
