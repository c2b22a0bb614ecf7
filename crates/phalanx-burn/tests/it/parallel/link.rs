//! Layers on several ranks by hand.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use phalanx::testing::{self, Fabric};
use phalanx::{ProcessGroup, Rank, Result};
use phalanx_burn::Ddp;
use phalanx_burn::parallel::StageLink;
use std::time::Duration;

use super::model::{Part, Whole, gradients_of, in_order, loss, rows, scalar};
use crate::common::{device, distance, run};

const LAYERS: usize = 6;

/// The encoder on a row of ranks.
fn split(group: &ProcessGroup, part: &Part) -> Result<Tensor<1>> {
    let (rank, last) = (group.rank().get(), group.world_size().get() - 1);
    let (tokens, classes) = rows(0, 4);
    let x = match &part.tokens {
        Some(embedding) => embedding.forward(tokens),
        None => StageLink::new(group, Rank::new(rank - 1))?.recv_forward(&device())?,
    };
    match &part.head {
        Some(head) => Ok(loss(head, part.hidden(x), classes)),
        None => {
            assert!(rank < last);
            StageLink::new(group, Rank::new(rank + 1))?.send_forward(part.hidden(x))
        }
    }
}

fn check(ranks: u32, fabric: Fabric) {
    let whole = Whole::new(LAYERS);
    let expected_loss = whole.loss(rows(0, 4));
    let expected = gradients_of(&whole, &expected_loss.backward());
    let ours = testing::run(ranks, fabric, |group| {
        let part = Part::new(LAYERS, group.rank().index(), ranks as usize);
        let loss = split(&group, &part).unwrap();
        let gradients = gradients_of(&part, &loss.backward());
        assert!(group.failure().is_none());
        (scalar(&loss), gradients)
    });
    let (losses, gradients): (Vec<f64>, Vec<_>) = ours.into_iter().unzip();
    let last = losses[ranks as usize - 1];
    assert!((last - scalar(&expected_loss)).abs() < 1e-6, "{last}");
    let apart = distance(&in_order(gradients), &expected);
    assert!(apart < 1e-6, "{ranks} ranks over {fabric:?}: {apart}");
}

#[test]
fn an_encoder_on_two_ranks_is_one_process() {
    for fabric in Fabric::ALL {
        check(2, fabric);
    }
}

#[test]
fn so_it_is_on_three_ranks() {
    check(3, Fabric::InProcess);
}

#[test]
fn gradients_find_their_tensors_in_whatever_order_they_come() {
    // Two tensors of one shape, of which the second is sent by a much deeper graph.
    let weights = |value: f32| Tensor::<1>::from_floats([value, 2.0 * value], &device()).require_grad();
    let ours = run(2, |group| {
        let link = StageLink::new(&group, Rank::new(1 - group.rank().get())).unwrap();
        if group.rank().is_main() {
            let (a, b) = (weights(1.0), weights(3.0));
            let deep = (0..9).fold(b.clone(), |x, _| x * 1.0);
            let first = link.send_forward(a.clone() * 1.0).unwrap();
            let second = link.send_forward(deep).unwrap();
            let gradients = (first + second).backward();
            let values = |x: &Tensor<1>| x.grad(&gradients).unwrap().into_data().iter::<f32>().collect();
            vec![values(&a), values(&b)]
        } else {
            let a: Tensor<1> = link.recv_forward(&device()).unwrap();
            let b: Tensor<1> = link.recv_forward(&device()).unwrap();
            drop((a * 10.0 + b.powi_scalar(2)).sum().backward());
            Vec::<Vec<f32>>::new()
        }
    });
    assert_eq!(ours[0], [[10.0, 10.0], [6.0, 12.0]]);
}

#[test]
fn a_link_goes_with_ddp_and_evaluation_sends_no_gradients() {
    // Two replicas of a model of two layers: ranks 0 and 1 have the first, 2 and 3 the second.
    let layer = |rank: usize| {
        let mut layer = LinearConfig::new(3, 3).init(&device());
        layer.weight = layer.weight.map(|old| {
            let wave: Vec<f32> = (0..9).map(|i| (1.3 * i as f32 + rank as f32).sin()).collect();
            Tensor::<1>::from_floats(wave.as_slice(), &old.device()).reshape([3, 3]).require_grad()
        });
        layer
    };
    let x = |replica: usize| Tensor::<2>::ones([2, 3], &device()) * (1.0 + replica as f32);
    let step = |first: &Linear, second: &Linear, replica: usize| {
        second.forward(first.forward(x(replica)).tanh()).powi_scalar(2).mean()
    };
    let (first, second) = (layer(0), layer(1));
    first.bias.as_ref().unwrap();
    let ours = run(4, |group| {
        let (rank, replica) = (group.rank().index(), group.rank().index() % 2);
        let same = group.split(Some(rank as u32 / 2), 0).unwrap().unwrap();
        let mut own = layer(rank / 2);
        own.bias = None;
        let mut ddp = Ddp::new(own, &same).unwrap();
        let link = StageLink::new(&group, Rank::new((rank as u32 + 2) % 4)).unwrap();
        let run = |layer: &Linear, device: &Device| match rank / 2 {
            0 => link.send_forward(layer.forward(x(replica).to_device(device)).tanh()).unwrap(),
            _ => layer.forward(link.recv_forward::<2>(device).unwrap()).powi_scalar(2).mean(),
        };
        let loss = ddp.forward(|layer| run(layer, &device())).unwrap();
        let gradients = ddp.backward(&loss).unwrap();
        let gradient: Vec<f32> =
            gradients.get::<2>(ddp.model().weight.id).unwrap().into_data().iter::<f32>().collect();
        let evaluated = run(ddp.model(), &device());
        (gradient, scalar(&loss), scalar(&evaluated))
    });
    let (mut first, mut second) = (first, second);
    (first.bias, second.bias) = (None, None);
    let loss = (step(&first, &second, 0) + step(&first, &second, 1)) / 2.0;
    let gradients = loss.backward();
    let expected = |layer: &Linear| -> Vec<f32> {
        layer.weight.val().grad(&gradients).unwrap().into_data().iter::<f32>().collect()
    };
    for (rank, (gradient, loss, evaluated)) in ours.iter().enumerate() {
        let expected = expected(if rank < 2 { &first } else { &second });
        assert!(distance(std::slice::from_ref(gradient), &[expected]) < 1e-6, "rank {rank}");
        assert_eq!(loss, evaluated);
    }
}

#[test]
fn what_is_not_sent_as_it_is_received_is_an_error_on_both_sides() {
    let errors = run(2, |group| {
        let group = group.with_timeout(Duration::from_secs(20));
        let link = StageLink::new(&group, Rank::new(1 - group.rank().get())).unwrap();
        if group.rank().is_main() {
            let x = Tensor::<2>::ones([2, 3], &device()).require_grad();
            let loss = match link.send_forward(x.clone()) {
                Ok(loss) => loss,
                Err(error) => return error,
            };
            let gradients = loss.backward();
            // Backward cannot return the error: the gradient is no number, and the group has ended.
            assert!(x.grad(&gradients).unwrap().into_data().iter::<f32>().all(f32::is_nan));
            group.failure().unwrap()
        } else {
            link.recv_forward::<3>(&device()).unwrap_err()
        }
    });
    assert!(errors[1].is_mismatch() && errors[1].to_string().contains("of 3 dimensions"), "{}", errors[1]);
    assert!(errors[0].to_string().contains("of 3 dimensions"), "{}", errors[0]);
    let group = ProcessGroup::alone().unwrap();
    for peer in [0, 1] {
        assert!(StageLink::new(&group, Rank::new(peer)).unwrap_err().is_invalid_argument());
    }
}
