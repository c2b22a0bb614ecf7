//! Two devices of one process.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use phalanx::Result;
use phalanx_burn::{DataParallel, Destination, Scatter, TowerGradients};
use phalanx_nccl::DeviceGroup;

use super::{IDLE, Net, RANKS, ROWS, WHAT, WIDTH, calls, error, is_real, reference, sgd, stand_in};
use crate::common::{device, distance, floats, samples};
use crate::devices::STEPS;
use crate::ranks::start;

/// Runs one process that has both devices.
pub(super) fn devices_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = if is_real() { None } else { Some(stand_in::build(folder.path())) };
    let copies = folder.path().join("copies");
    let mut variables =
        vec![(WHAT, "one_process"), ("STANDIN_CUDA_HOST", "any"), ("STANDIN_CUDA_DEVICES", "2")];
    variables.push(("STANDIN_CUDA_COPIES", copies.to_str().unwrap()));
    let libraries = libraries.iter().flatten().map(|(name, path)| (*name, path.to_str().unwrap()));
    variables.extend(libraries);
    let (_server, mut processes) = start("nccl", 1, &variables);
    let (finished, text) = processes[0].outcome("devices of one process");
    assert!(finished, "{text}");
    if is_real() {
        return;
    }
    // What the driver has copied: the inputs of each step, and what is gathered, and nothing twice.
    let copies = std::fs::read_to_string(&copies).unwrap();
    let of = |way: &str| copies.lines().filter(|copy| copy.starts_with(way)).count();
    // Rows and their numbers: twice from the first device, and once from the second.
    let of_towers = 2 * STEPS;
    // And two tensors of an input of the program's own.
    assert_eq!((of("0 1 "), of("1 0 ")), (2 * of_towers + 4 * STEPS + 2, of_towers + STEPS), "{copies}");
    // Outputs are as long as the rows of towers.
    let output = format!("1 0 {}", ROWS * WIDTH * 4);
    assert_eq!(copies.lines().filter(|copy| *copy == output).count(), 2 * STEPS, "{copies}");
}

/// The replicas' parameters come by a broadcast, and their gradients go by a reduce. Inputs, outputs and their gradients are copied from device to
/// device.
pub(super) fn one_process() -> Result<()> {
    let mut cuda = (0..2).map(phalanx_nccl::Device::open).collect::<Result<Vec<_>>>()?;
    let mut devices: Vec<Device> = match is_real() {
        true => (0..2_usize).map(|number| Device::cuda(number).autodiff()).collect(),
        false => vec![device(); 2],
    };
    let one = DeviceGroup::of_devices(&cuda[..1])?;
    let refused = TowerGradients::with_nccl(Net::new(), devices.clone(), one).unwrap_err();
    assert!(refused.to_string().contains("2 devices need as many groups"), "{refused}");
    // The groups of other ranks.
    let mut others = DeviceGroup::of_devices(&cuda)?;
    others.reverse();
    let refused = TowerGradients::with_nccl(Net::new(), devices.clone(), others).unwrap_err();
    assert!(refused.to_string().contains("those of their ranks in order"), "{refused}");
    for (case, is_reversed) in [("plain", false), ("unused", false), ("plain", true)] {
        if is_reversed {
            // The main device is the last one.
            cuda.reverse();
            devices.reverse();
        }
        let groups = DeviceGroup::of_devices(&cuda)?;
        let first = groups[0].clone();
        let mut towers = TowerGradients::with_nccl(Net::new(), devices.clone(), groups)?;
        let mut optimizer = sgd();
        for step in 0..STEPS {
            let (x, _) = samples(step * RANKS * ROWS, (step + 1) * RANKS * ROWS);
            // Of which replica each row is.
            let number = |number: f32| Tensor::<2>::full([ROWS, 1], number, &device());
            let numbers = Tensor::cat(vec![number(0.0), number(1.0)], 0);
            let (_, gradients) = towers.backward((x, numbers), |net, (x, numbers)| {
                let replica = numbers.mean().into_scalar::<f32>() as usize;
                let without = if case == "unused" { vec![IDLE, replica] } else { Vec::new() };
                net.loss_of(x, &without)
            })?;
            let idle = gradients.get::<1>(towers.model().layers[IDLE].weight.id);
            assert_eq!(idle.is_none(), case == "unused");
            towers.step(&mut optimizer, 0.05, gradients)?;
        }
        let distance = distance(&floats(&towers.model().valid()), &reference(case));
        assert!(distance < 1e-4, "{case}: {distance:e} away");
        // From one device to the other; not what no replica has used.
        let all = 4 * towers.model().num_params();
        let idle = if case == "unused" { 4 * 2 * WIDTH } else { 0 };
        let transfers = towers.transfers();
        assert_eq!(transfers.replicate.bytes, STEPS * all);
        assert_eq!(transfers.reduce.bytes, STEPS * (all - idle));
        assert_eq!(transfers.scatter.bytes, STEPS * ROWS * (WIDTH + 1) * 4);
        assert_eq!(transfers.total().host_bytes, 0);
        // One bucket each way in each step; they are counted from 0.
        assert_eq!(calls(&first) + 1, 2 * STEPS);
        drop(towers);
    }
    cuda.reverse();
    devices.reverse();
    gathered(&cuda, &devices)?;
    own_inputs(&cuda, &devices)?;
    inputs_of_another_device(&cuda, &devices)
}

/// Replicas whose outputs are gathered, of inputs of all kinds.
fn gathered(cuda: &[phalanx_nccl::Device], devices: &[Device]) -> Result<()> {
    let groups = DeviceGroup::of_devices(cuda)?;
    let first = groups[0].clone();
    let mut parallel = DataParallel::with_nccl(Net::new(), devices.to_vec(), groups)?;
    let mut optimizer = sgd();
    let count = RANKS * ROWS;
    let mut bytes = 0;
    for step in 0..STEPS {
        let (x, _) = samples(step * count, (step + 1) * count);
        // Column by column in memory.
        let columns = Tensor::<2>::from_data(x.clone().transpose().into_data(), &device()).transpose();
        let numbers = Tensor::<1, Int>::arange(0..count as i64, &device());
        let thirds = numbers.clone().remainder_scalar(3).equal_elem(0);
        bytes += ROWS * (WIDTH * 4 + numbers.dtype().size() + thirds.dtype().size());
        let out = parallel.forward((columns, (numbers, thirds)), |net, (x, (numbers, thirds))| {
            let own: Vec<i64> = numbers.into_data().iter::<i64>().collect();
            assert!(own == (0..4).collect::<Vec<_>>() || own == (4..8).collect::<Vec<_>>(), "{own:?}");
            let thirds: Vec<bool> = thirds.int().into_data().iter::<i64>().map(|one| one != 0).collect();
            assert_eq!(thirds, own.iter().map(|number| number % 3 == 0).collect::<Vec<_>>());
            net.forward(x, &[])
        })?;
        let gradients = parallel.backward(&error(out, x))?;
        parallel.step(&mut optimizer, 0.05, gradients)?;
    }
    let distance = distance(&floats(&parallel.model().valid()), &reference("plain"));
    assert!(distance < 1e-4, "gathered: {distance:e} away");
    let transfers = parallel.transfers();
    assert_eq!(transfers.scatter.bytes, bytes);
    assert_eq!(transfers.gather.bytes, STEPS * 2 * ROWS * WIDTH * 4);
    assert_eq!(transfers.total().host_bytes, 0);
    assert_eq!(calls(&first) + 1, 2 * STEPS);
    // After a failure nothing is copied any more.
    first.device().abort(phalanx::Error::aborted("the test ends it"));
    let (x, _) = samples(0, count);
    let failed = parallel.forward(x, |net, x| net.forward(x, &[])).unwrap_err().to_string();
    assert!(failed.contains("the test ends it"), "{failed}");
    assert_eq!(parallel.transfers().scatter.bytes, bytes);
    Ok(())
}

/// An input of the program's own, which computes with what it copies before all of it is copied.
struct Halved(Tensor<2>);

impl Scatter for Halved {
    fn samples(&self) -> Result<usize> {
        self.0.samples()
    }

    fn part(&self, samples: Range<usize>) -> Self {
        Self(self.0.part(samples))
    }

    fn copy_to(self, to: &mut Destination<'_>) -> Result<Self> {
        Ok(Self(self.0.copy_to(to)? * 0.5))
    }
}

/// The second half of the rows is on another device, and has been halved there.
fn own_inputs(cuda: &[phalanx_nccl::Device], devices: &[Device]) -> Result<()> {
    let groups = DeviceGroup::of_devices(cuda)?;
    let mut towers = TowerGradients::with_nccl(Net::new(), devices.to_vec(), groups)?;
    let x = samples(0, RANKS * ROWS).0;
    let is_whole = AtomicU64::new(0);
    let half = |from: usize, factor: f64| -> Vec<f32> {
        (x.clone().narrow(0, from, ROWS) * factor).into_data().iter::<f32>().collect()
    };
    let expected = [half(0, 1.0), half(ROWS, 0.5)];
    let (loss, _) = towers.backward((Halved(x.clone()), x.clone()), |net, (Halved(own), _)| {
        let found: Vec<f32> = own.to_data().iter::<f32>().collect();
        is_whole.fetch_add(u64::from(expected.contains(&found)), Ordering::Relaxed);
        net.loss_of(own, &[])
    })?;
    assert!(loss.is_finite() && is_whole.load(Ordering::Relaxed) == 2);
    Ok(())
}

/// They go through the host's memory.
fn inputs_of_another_device(cuda: &[phalanx_nccl::Device], devices: &[Device]) -> Result<()> {
    let groups = DeviceGroup::of_devices(cuda)?;
    let mut towers = TowerGradients::with_nccl(Net::new(), devices.to_vec(), groups)?;
    let x = samples(0, RANKS * ROWS).0.to_device(&Device::flex().autodiff());
    let (loss, _) = towers.backward(x, |net, x| net.loss_of(x.to_device(&net.first.val().device()), &[]))?;
    assert!(loss.is_finite());
    let transfers = towers.transfers();
    assert_eq!(transfers.scatter.host_bytes, ROWS * WIDTH * 4);
    assert_eq!(transfers.total().host_bytes, transfers.scatter.bytes);
    Ok(())
}
