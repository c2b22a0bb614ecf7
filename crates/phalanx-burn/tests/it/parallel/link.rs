//! Layers on several ranks by hand.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use phalanx::testing::{self, Fabric};
use phalanx::{ProcessGroup, Rank, Result};
use phalanx_burn::Ddp;
use phalanx_burn::parallel::{self, StageLink};
use std::time::Duration;

use super::model::{Part, Whole, gradients_of, in_order, loss, rows, scalar};
use crate::common::{device, distance, run};

const LAYERS: usize = 6;

/// The links of a rank in a row: with the rank before, and with the one after.
fn links(group: &ProcessGroup) -> [Option<StageLink>; 2] {
    let (rank, ranks) = (group.rank().get(), group.world_size().get());
    let link = |peer: u32| StageLink::new(group, Rank::new(peer)).unwrap();
    [rank.checked_sub(1).map(link), (rank + 1 < ranks).then(|| link(rank + 1))]
}

/// The encoder on a row of ranks.
fn split([before, after]: &[Option<StageLink>; 2], part: &Part) -> Result<Tensor<1>> {
    let (tokens, classes) = rows(0, 4);
    let x = match &part.tokens {
        Some(embedding) => embedding.forward(tokens),
        None => before.as_ref().unwrap().recv_forward(&device())?,
    };
    match &part.head {
        Some(head) => Ok(loss(head, part.hidden(x), classes)),
        None => after.as_ref().unwrap().send_forward(part.hidden(x)),
    }
}

fn check(ranks: u32, fabric: Fabric) {
    let whole = Whole::new(LAYERS);
    let expected_loss = whole.loss(rows(0, 4));
    let expected = gradients_of(&whole, &expected_loss.backward());
    let ours = testing::run(ranks, fabric, |group| {
        let part = Part::new(LAYERS, group.rank().index(), ranks as usize);
        let links = links(&group);
        let loss = split(&links, &part).unwrap();
        let gradients = gradients_of(&part, &loss.backward());
        // The same links serve the next step.
        let again = split(&links, &part).unwrap();
        assert_eq!(gradients_of(&part, &again.backward()), gradients);
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
fn a_tensor_that_takes_no_gradient_gets_none() {
    for is_alone in [true, false] {
        let ours = run(2, |group| {
            let peer = Rank::new(1 - group.rank().get());
            let link = StageLink::new(&group, peer).unwrap();
            let gradient = |of: &Tensor<1>, loss: Tensor<1>| -> Vec<f32> {
                of.grad(&loss.backward()).unwrap().into_data().iter().collect()
            };
            if group.rank().is_main() {
                let mask = link.send_forward(Tensor::<1>::from_floats([2.0, 3.0], &device())).unwrap();
                let own = (!is_alone).then(|| {
                    let x = Tensor::<1>::ones([2], &device()).require_grad();
                    gradient(&x, link.send_forward(x.clone()).unwrap() + mask)
                });
                // Nothing lies in front of what comes next.
                let mut next = [0i64];
                group.recv(&mut next, peer).unwrap();
                assert_eq!(next, [7]);
                own.unwrap_or_default()
            } else {
                let mask: Tensor<1> = link.recv_forward(&device()).unwrap();
                let weights = Tensor::<1>::from_floats([5.0, 7.0], &device()).require_grad();
                let mut product = mask * weights.clone();
                if !is_alone {
                    product = product * link.recv_forward::<1>(&device()).unwrap();
                }
                let own = gradient(&weights, product.sum());
                group.send(&[7i64], peer).unwrap();
                own
            }
        });
        let expected = if is_alone { Vec::new() } else { vec![10.0, 21.0] };
        assert_eq!(ours, [expected, vec![2.0, 3.0]]);
    }
}

/// Two links between the same ranks, whose gradients come in the order of the links or in the other one.
#[test]
fn a_gradient_of_another_link_is_not_taken_for_one_of_this_link() {
    for is_in_order in [true, false] {
        let outcomes = run(2, |group| {
            let peer = Rank::new(1 - group.rank().get());
            let [one, other] = [(); 2].map(|()| StageLink::new(&group, peer).unwrap());
            if group.rank().is_main() {
                let [a, b] = [1f32, 2.0].map(|x| Tensor::<1>::from_floats([x], &device()).require_grad());
                let (first, second) =
                    (one.send_forward(a.clone()).unwrap(), other.send_forward(b.clone()).unwrap());
                let got = |x: &Tensor<1>, from: Tensor<1>| -> f32 {
                    x.grad(&from.backward()).unwrap().into_data().iter::<f32>().next().unwrap()
                };
                let gradients = [got(&a, first), got(&b, second)];
                (gradients, group.failure().map(|error| error.to_string()))
            } else {
                let a: Tensor<1> = one.recv_forward(&device()).unwrap();
                let b: Tensor<1> = other.recv_forward(&device()).unwrap();
                let (first, second) = if is_in_order { (a * 3.0, b * 5.0) } else { (b * 5.0, a * 3.0) };
                drop(first.backward());
                drop(second.backward());
                ([0.0; 2], None)
            }
        });
        let (gradients, failure) = &outcomes[0];
        match failure {
            None => assert!(is_in_order && *gradients == [3.0, 5.0], "{gradients:?}"),
            Some(said) => {
                assert!(!is_in_order && said.contains("of another StageLink"), "{said}");
                assert!(gradients[0].is_nan(), "{gradients:?}");
            }
        }
    }
}

#[test]
fn tensors_of_two_links_are_not_mixed_up() {
    run(2, |group| {
        let peer = Rank::new(1 - group.rank().get());
        let [one, other] = [(); 2].map(|()| StageLink::new(&group, peer).unwrap());
        if group.rank().is_main() {
            // The last one's number is that of the next tensor of either link.
            for link in [&one, &other, &other] {
                let _ = link.send_forward(Tensor::<1>::ones([2], &device()));
            }
        } else {
            for link in [&one, &other] {
                link.recv_forward::<1>(&device()).unwrap();
            }
            let error = one.recv_forward::<1>(&device()).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains("of another StageLink"), "{error}");
            assert!(group.failure().is_some());
        }
    });
}

#[test]
fn a_gradient_that_came_early_must_fit_its_tensor_too() {
    /// The type `dtype`, 1 for f32 and 2 for f64, and one dimension.
    fn header(number: i64, dtype: i64, side: i64, link: i64) -> [i64; 13] {
        [2, number, dtype, 1, side, 0, 0, 0, 0, 0, 0, 0, link]
    }
    for (dtype, side, bytes) in [(1, 2, 8), (2, 1, 8)] {
        let failures = run(2, |group| {
            let peer = Rank::new(1 - group.rank().get());
            if group.rank().is_main() {
                let link = StageLink::new(&group, peer).unwrap();
                let [a, b] = [1f32, 2.0].map(|x| Tensor::<1>::from_floats([x], &device()).require_grad());
                let (first, second) =
                    (link.send_forward(a.clone()).unwrap(), link.send_forward(b.clone()).unwrap());
                let gradients = first.backward();
                assert_eq!(a.grad(&gradients).unwrap().into_data().iter::<f32>().next(), Some(7.0));
                assert!(group.failure().is_none());
                let gradients = second.backward();
                assert!(b.grad(&gradients).unwrap().into_data().iter::<f32>().all(f32::is_nan));
                group.failure().map(|error| error.to_string())
            } else {
                let mut words = [0i64; 13];
                for _ in 0..2 {
                    group.recv(&mut words, peer).unwrap();
                    group.recv(&mut [0u8; 4], peer).unwrap();
                }
                let link = words[12];
                // The second's comes first, and does not fit.
                group.send(&header(1, dtype, side, link), peer).unwrap();
                group.send(&vec![0u8; bytes], peer).unwrap();
                group.send(&header(0, 1, 1, link), peer).unwrap();
                group.send(&7f32.to_ne_bytes(), peer).unwrap();
                None
            }
        });
        let failure = failures[0].as_deref().unwrap();
        assert!(
            failure.contains("waits for the gradient of tensor 1, of shape [1] and type F32"),
            "{failure}"
        );
    }
}

#[test]
fn a_tensor_for_which_there_is_no_memory_ends_the_group() {
    run(2, |group| {
        let peer = Rank::new(1 - group.rank().get());
        if group.rank().is_main() {
            group.send(&[1i64, 0, 1, 1, 1 << 60, 0, 0, 0, 0, 0, 0, 0, 7], peer).unwrap();
        } else {
            let link = StageLink::new(&group, peer).unwrap();
            let error = link.recv_forward::<1>(&device()).unwrap_err();
            assert!(error.to_string().contains("no memory"), "{error}");
            assert!(group.failure().unwrap().to_string().contains("no memory"));
        }
    });
}

#[test]
fn a_tensor_that_cannot_be_sent_and_a_message_that_is_none_end_the_group() {
    let errors = run(2, |group| {
        let link = StageLink::new(&group, Rank::new(1 - group.rank().get())).unwrap();
        match group.rank().is_main() {
            true => {
                link.send_forward(Tensor::<9>::ones([1; 9], &device())).map(drop).unwrap_err().to_string()
            }
            false => link.recv_forward::<2>(&device()).map(drop).unwrap_err().to_string(),
        }
    });
    assert!(errors.iter().all(|error| error.contains("has at most 8 dimensions")), "{errors:?}");
    run(2, |group| {
        let peer = Rank::new(1 - group.rank().get());
        if group.rank().is_main() {
            // A message of the program's own.
            let sent = group.send(&[9i64; 13], peer);
            let ended = sent.and_then(|()| group.barrier()).unwrap_err().to_string();
            assert!(ended.contains("unknown header") && ended.contains("rank 1"), "{ended}");
        } else {
            let error = StageLink::new(&group, peer).unwrap().recv_forward::<1>(&device()).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains("unknown header"), "{error}");
        }
    });
}

#[test]
fn a_link_goes_with_ddp_and_evaluation_sends_no_gradients() {
    with_ddp(None);
}

#[test]
fn ranks_of_a_chain_count_by_one_weight() {
    for weights in [[3.0, 1.0], [2.0, 0.0]] {
        with_ddp(Some(weights));
    }
}

/// By replica, how its samples count.
fn with_ddp(weights: Option<[f64; 2]>) {
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
        let gradients = match weights {
            Some(weights) => ddp.backward_weighted(&loss, weights[replica]),
            None => ddp.backward(&loss),
        };
        let gradients = gradients.unwrap();
        let gradient: Vec<f32> =
            gradients.get::<2>(ddp.model().weight.id).unwrap().into_data().iter::<f32>().collect();
        let evaluated = run(ddp.model(), &device());
        (gradient, scalar(&loss), scalar(&evaluated))
    });
    let (mut first, mut second) = (first, second);
    (first.bias, second.bias) = (None, None);
    let [one, other] = weights.unwrap_or([1.0, 1.0]);
    let loss = (step(&first, &second, 0) * one + step(&first, &second, 1) * other) / (one + other);
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
fn the_norm_of_a_rank_s_layers_in_a_chain_is_not_taken_for_the_model_s() {
    // A program that uses its link outside of the closure.
    run(2, |group| {
        let link = StageLink::new(&group, Rank::new(1 - group.rank().get())).unwrap();
        let layer: Linear = LinearConfig::new(3, 3).init(&device());
        let mut ddp = Ddp::new(layer, &ProcessGroup::alone().unwrap()).unwrap();
        let loss = if group.rank().is_main() {
            let x = Tensor::<2>::ones([2, 3], &device());
            link.send_forward(ddp.forward(|layer| layer.forward(x)).unwrap()).unwrap()
        } else {
            let x = link.recv_forward::<2>(&device()).unwrap();
            ddp.forward(|layer| layer.forward(x).powi_scalar(2).mean()).unwrap()
        };
        let mut gradients = ddp.backward(&loss).unwrap();
        let error = ddp.clip_grad_norm(&mut gradients, 1e-3).unwrap_err();
        assert!(error.to_string().contains("a chain of links"), "{error}");
        group.barrier().unwrap();
    });
    let norms = run(2, |group| {
        let is_first = group.rank().is_main();
        let link = StageLink::new(&group, Rank::new(1 - group.rank().get())).unwrap();
        let layer: Linear = LinearConfig::new(3, 3).init(&device());
        let mut ddp = Ddp::new(layer, &ProcessGroup::alone().unwrap()).unwrap();
        let pass = |layer: &Linear| match is_first {
            true => link.send_forward(layer.forward(Tensor::<2>::ones([2, 3], &device()))).unwrap(),
            false => layer.forward(link.recv_forward::<2>(&device()).unwrap()).powi_scalar(2).mean(),
        };
        let loss = ddp.forward(pass).unwrap();
        let mut gradients = ddp.backward(&loss).unwrap();
        let error = ddp.clip_grad_norm(&mut gradients, 1e-3).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("a chain of links"), "{error}");
        assert!(error.remedy().unwrap().contains("parallel::clip_grad_norm"), "{error}");
        let chain = Some(&group);
        parallel::clip_grad_norm(ddp.model(), &mut gradients, 1e9, None, chain, &[]).unwrap().to_bits()
    });
    assert_eq!(norms[0], norms[1]);
    // What takes no gradient comes from no layer that is trained.
    run(2, |group| {
        let link = StageLink::new(&group, Rank::new(1 - group.rank().get())).unwrap();
        if group.rank().is_main() {
            drop(link.send_forward(Tensor::<2>::ones([2, 3], &device())).unwrap());
        } else {
            let layer: Linear = LinearConfig::new(3, 3).init(&device());
            let mut ddp = Ddp::new(layer, &ProcessGroup::alone().unwrap()).unwrap();
            let pass = |layer: &Linear| layer.forward(link.recv_forward::<2>(&device()).unwrap()).mean();
            let loss = ddp.forward(pass).unwrap();
            let mut gradients = ddp.backward(&loss).unwrap();
            ddp.clip_grad_norm(&mut gradients, 1e-3).unwrap();
        }
        group.barrier().unwrap();
    });
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
