//! Norms over all parts of a model, and in which groups there are none.

use std::sync::Barrier;

use phalanx::ProcessGroup;
use phalanx::mesh::DeviceMesh;
use phalanx_burn::Ddp;

use super::*;

#[test]
fn the_norm_of_divided_gradients_is_the_whole_one() {
    let encoder = || encoder_config(2).init(&device()).map(&mut Waves(0));
    let whole = encoder();
    let loss = weighed(whole.forward(TransformerEncoderInput::new(input())));
    let mut gradients = GradientsParams::from_grads(loss.backward(), &whole);
    let expected = phalanx_burn::clip_grad_norm(&whole, &mut gradients, 0.5).unwrap();
    let norms = run(2, |group| {
        let group = TensorGroup::new(&group);
        let model = ParallelEncoder::new(encoder(), &group, Activations::Replicated).unwrap();
        let loss = weighed(model.forward(input(), None, None));
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        let norm = parallel::clip_grad_norm(&model, &mut gradients, 0.5, Some(&group), None, &[]).unwrap();
        let after = parallel::clip_grad_norm(&model, &mut gradients, 0.5, Some(&group), None, &[]).unwrap();
        assert!((after - 0.5).abs() < 1e-4, "{after}");
        norm
    });
    assert_eq!(norms[0].to_bits(), norms[1].to_bits());
    assert!((norms[0] / expected - 1.0).abs() < 1e-5, "{} {expected}", norms[0]);
}

/// On every rank, of replicas too, and nothing is scaled.
#[test]
fn the_norm_of_a_part_is_refused() {
    let layer = || LinearConfig::new(WIDTH, WIDTH).init(&device()).map(&mut Waves(0));
    run(4, |group| {
        let mesh = DeviceMesh::new(&group, &[("data", 2), ("tensor", 2)]).unwrap();
        let tensor = TensorGroup::new(mesh.group("tensor").unwrap());
        let model = vec![ColumnParallelLinear::new(layer(), &tensor).unwrap()];
        let mut ddp = Ddp::new(model, mesh.group("data").unwrap()).unwrap();
        let loss = ddp.forward(|model| weighed(model[0].forward(input()))).unwrap();
        let mut gradients = ddp.backward(&loss).unwrap();
        let id = ddp.model()[0].weight.id;
        let before = values(gradients.get::<2>(id).unwrap());
        for error in [
            ddp.clip_grad_norm(&mut gradients, 1e-3).unwrap_err(),
            phalanx_burn::clip_grad_norm(ddp.model(), &mut gradients, 1e-3).unwrap_err(),
            parallel::clip_grad_norm(ddp.model(), &mut gradients, 1e-3, None, None, &[]).unwrap_err(),
        ] {
            assert!(error.is_invalid_argument() && error.to_string().contains("`0.weight`"), "{error}");
            assert!(error.remedy().unwrap().contains("parallel::clip_grad_norm"), "{error}");
        }
        assert_eq!(values(gradients.get::<2>(id).unwrap()), before);
        // The group goes on.
        let (tensor, model) = (Some(&tensor), ddp.model());
        parallel::clip_grad_norm(model, &mut gradients, 1e-3, tensor, None, &[]).unwrap();
        assert_ne!(values(gradients.get::<2>(id).unwrap()), before);
    });
    // The part of a group of one is the whole, and what is frozen has no gradient.
    let alone = ProcessGroup::alone().unwrap();
    let model = ColumnParallelLinear::new(layer(), &TensorGroup::new(&alone)).unwrap();
    let mut ddp = Ddp::new(model, &alone).unwrap();
    let loss = ddp.forward(|model| weighed(model.forward(input()))).unwrap();
    let mut gradients = ddp.backward(&loss).unwrap();
    ddp.clip_grad_norm(&mut gradients, 1e-3).unwrap();
    run(2, |group| {
        let base = ColumnParallelLinear::new(layer(), &TensorGroup::new(&group)).unwrap().no_grad();
        let mut ddp = Ddp::new((base, layer()), &ProcessGroup::alone().unwrap()).unwrap();
        let loss = ddp.forward(|(_, layer)| weighed(layer.forward(input()))).unwrap();
        let mut gradients = ddp.backward(&loss).unwrap();
        ddp.clip_grad_norm(&mut gradients, 1e-3).unwrap();
    });
}

/// Its ranks may have the same parts, whose squares would be added up.
#[test]
fn a_norm_over_another_group_than_that_of_the_layers_is_refused_on_every_rank() {
    for (data, tensor) in [(2, 2), (4, 1)] {
        let together = Barrier::new(4);
        let outcomes = run(4, |group| {
            let mesh = DeviceMesh::new(&group, &[("data", data), ("tensor", tensor)]).unwrap();
            let (data, tensor) = (mesh.group("data").unwrap(), mesh.group("tensor").unwrap());
            let layer = LinearConfig::new(WIDTH, WIDTH).init(&device()).map(&mut Waves(0));
            let layer = ColumnParallelLinear::new(layer, &TensorGroup::new(tensor)).unwrap();
            let mut ddp = Ddp::new(layer, data).unwrap();
            let loss = ddp.forward(|layer| weighed(layer.forward(input()))).unwrap();
            let mut gradients = ddp.backward(&loss).unwrap();
            let other = TensorGroup::new(data);
            // An error ends the groups, and no other rank is in the middle of its backward pass.
            together.wait();
            parallel::clip_grad_norm(ddp.model(), &mut gradients, 1e-3, Some(&other), None, &[]).unwrap_err()
        });
        for error in outcomes {
            assert!(error.to_string().contains("of a divided layer, and in the tensor group"), "{error}");
        }
    }
}

/// It would be made of equal parts.
#[test]
fn a_module_is_gathered_by_no_other_group_than_that_of_its_layers() {
    for (data, tensor, said) in [
        (2, 2, "rank 1 has part 0 of 2 of a divided layer, and in this tensor group it is number 1 of 2"),
        (4, 1, "rank 0 has part 0 of 1 of a divided layer, and in this tensor group it is number 0 of 4"),
    ] {
        run(4, |group| {
            let mesh = DeviceMesh::new(&group, &[("data", data), ("tensor", tensor)]).unwrap();
            let tensor = TensorGroup::new(mesh.group("tensor").unwrap());
            let layer = || LinearConfig::new(WIDTH, WIDTH).init(&device()).map(&mut Waves(0));
            let divided = ColumnParallelLinear::new(layer(), &tensor).unwrap();
            let other = TensorGroup::new(mesh.group("data").unwrap());
            let error = other.gather_module(divided.clone()).unwrap_err();
            assert!(error.is_invalid_argument(), "{error}");
            // Of the ranks of the first part, or of the second.
            let text = error.to_string();
            assert!(text.contains("of a divided layer, and in this tensor group it is number"), "{text}");
            if group.rank().is_main() {
                assert!(text.contains(said), "{text}");
            }
            let whole = tensor.gather_module(divided).unwrap();
            assert_eq!(floats(&whole), floats(&layer()));
        });
    }
}
