//! The device of a rank, chosen when the program runs.
//!
//! ```
//! use phalanx_burn::device::{self, Kind};
//!
//! # fn main() -> phalanx::Result<()> {
//! let kind: Kind = std::env::args().nth(1).as_deref().unwrap_or("flex").parse()?;
//! # let kind = if kind == Kind::Flex { kind } else { Kind::Flex };
//! let device = device::for_local_rank(kind)?.autodiff();
//! # assert!(device.is_autodiff());
//! # Ok(())
//! # }
//! ```
//!
//! Devices besides Flex are features of this package: `cuda`, `wgpu`, `cpu`, `tch`. What has been run on which is in the guide,
//! `docs/guide/devices.md`.

use std::fmt;
use std::str::FromStr;

use burn::backend::DispatchDevice;
#[cfg(feature = "tch")]
use burn::backend::libtorch::LibTorchDevice;
use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn::tensor::DeviceType;
#[cfg(feature = "cube")]
use burn_cubecl::cubecl::RuntimeId;
use phalanx::env::LaunchEnv;
use phalanx::{Error, Result};

/// A kind of device. It can be parsed from its name in lower case, such as `cuda`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// The processors, with Burn's Flex kernels. There is one such device for each process.
    Flex,
    /// NVIDIA's GPUs. Needs the feature `cuda`.
    Cuda,
    /// GPUs through Vulkan, Metal or DirectX. Needs the feature `wgpu`.
    Wgpu,
    /// The processors, with CubeCL's kernels, which are compiled when the program runs. There is one such device for each process.
    /// Needs the feature `cpu`.
    Cpu,
    /// The processors, with PyTorch's kernels (libtorch). There is one such device for each process. Needs the feature `tch`.
    LibTorch,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Flex, Self::Cuda, Self::Wgpu, Self::Cpu, Self::LibTorch];

    fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Cuda => "cuda",
            Self::Wgpu => "wgpu",
            Self::Cpu => "cpu",
            Self::LibTorch => "libtorch",
        }
    }

    /// The feature of this package that it needs.
    fn feature(self) -> &'static str {
        match self {
            Self::LibTorch => "tch",
            Self::Flex | Self::Cuda | Self::Wgpu | Self::Cpu => self.name(),
        }
    }

    /// The devices of this kind that this process may use. One that is made of software, such as Mesa's lavapipe, is among them only
    /// if there is no other.
    ///
    /// # Errors
    /// If the program was built without the feature.
    pub fn devices(self) -> Result<Vec<Device>> {
        match self {
            Self::Flex => Ok(vec![Device::flex()]),
            #[cfg(feature = "cuda")]
            Self::Cuda => Ok(Device::enumerate(DeviceType::Cuda).into_iter().collect()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => {
                let in_software = Device::wgpu(DeviceKind::Cpu);
                let (software, hardware): (Vec<_>, Vec<_>) = Device::enumerate(DeviceType::Wgpu)
                    .into_iter()
                    .partition(|device| *device == in_software);
                Ok(if hardware.is_empty() { software } else { hardware })
            }
            #[cfg(feature = "cpu")]
            Self::Cpu => Ok(vec![Device::cpu()]),
            #[cfg(feature = "tch")]
            Self::LibTorch => Ok(vec![Device::libtorch()]),
            #[allow(unreachable_patterns, reason = "it depends on the features")]
            other => Err(Error::invalid_argument(format!(
                "this program was built without devices of kind {other}"
            ))
            .with_remedy(format!("build phalanx-burn with its feature `{}`", other.feature()))),
        }
    }

    /// Whether all processes of a host have the same device, the processors.
    fn is_shared(self) -> bool {
        matches!(self, Self::Flex | Self::Cpu | Self::LibTorch)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::invalid_argument(format!("there is no device of kind {name:?}; there are {names}"))
        })
    }
}

/// The device of this process: of all devices of this kind, the one whose number is the process's local rank (`LOCAL_RANK`,
/// which launchers set; 0 without a launcher). PyTorch's `torch.cuda.set_device(local_rank)`.
///
/// It is without autodiff: `for_local_rank(kind)?.autodiff()` is for training.
///
/// # Errors
/// If the program was built without the feature, the environment is not valid, or this process sees fewer devices. To have
/// processes share a device, choose it yourself, as with `Device::cuda(0)`; and so where a scheduler shows each process a device of its own
/// (Slurm's `--gpus-per-task`).
pub fn for_local_rank(kind: Kind) -> Result<Device> {
    let environment = LaunchEnv::from_process()?;
    let local_rank = environment.and_then(|environment| environment.local_rank).unwrap_or(0);
    choose(kind, kind.devices()?, local_rank as usize)
}

fn choose(kind: Kind, devices: Vec<Device>, local_rank: usize) -> Result<Device> {
    let (count, number) = (devices.len(), if kind.is_shared() { 0 } else { local_rank });
    devices.into_iter().nth(number).ok_or_else(|| {
        let error = Error::environment(format!(
            "this process has local rank {local_rank}, and sees {count} devices of kind {kind}"
        ));
        error.with_remedy(match count {
            0 => "install a driver, or choose another kind of device".to_owned(),
            1 => "start one process on each host; or, where a scheduler shows each process a device of its own, take that one, as with \
                  `Device::cuda(0)`"
                .to_owned(),
            _ => format!("start at most {count} processes on each host: --nproc-per-node {count}"),
        })
    })
}

/// Refuses devices whose memory this build cannot read.
pub(crate) fn check(device: &Device) -> Result<()> {
    kind_of(device).map(drop)
}

/// The name of the kind of `device`, as that of a [`Kind`].
///
/// # Errors
/// If this build cannot read its memory.
pub(crate) fn kind_of(device: &Device) -> Result<&'static str> {
    let inner = device.clone().inner();
    match inner.as_dispatch() {
        DispatchDevice::Flex(_) => Ok(Kind::Flex.name()),
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => Ok(match device.runtime() {
            RuntimeId::Cuda => Kind::Cuda.name(),
            RuntimeId::Wgpu => Kind::Wgpu.name(),
            RuntimeId::Cpu => Kind::Cpu.name(),
            // The program's own choice, by features of Burn's.
            RuntimeId::Hip => "rocm",
            RuntimeId::Metal => "metal",
        }),
        #[cfg(feature = "tch")]
        DispatchDevice::LibTorch(LibTorchDevice::Cpu) => Ok(Kind::LibTorch.name()),
        #[cfg(feature = "tch")]
        DispatchDevice::LibTorch(other) => Err(Error::invalid_argument(format!(
            "libtorch's device {other:?} has not been tried: of libtorch's, phalanx-burn takes the processors alone"
        ))
        .with_remedy("use Device::libtorch(), or a GPU with phalanx-burn's feature `cuda` or `wgpu`")),
        #[allow(unreachable_patterns, reason = "it depends on the features")]
        _ => Err(Error::invalid_argument(format!("this build of phalanx-burn does not know {device:?}"))
            .with_remedy(
                "build phalanx-burn with its feature cuda, wgpu, cpu or tch; or use one of their devices or Device::flex()",
            )),
    }
}

/// Whether the tensors of `device` lie in this process's memory.
pub(crate) fn is_in_memory(device: &Device) -> bool {
    match device.as_dispatch() {
        DispatchDevice::Flex(_) => true,
        #[cfg(feature = "tch")]
        DispatchDevice::LibTorch(LibTorchDevice::Cpu) => true,
        #[allow(unreachable_patterns, reason = "it depends on the features")]
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_unknown_ones_refused() {
        for kind in Kind::ALL {
            assert_eq!(kind.to_string().parse::<Kind>().unwrap(), kind);
        }
        let error = "gpu".parse::<Kind>().unwrap_err().to_string();
        assert!(error.contains("gpu") && error.contains("flex, cuda, wgpu, cpu, libtorch"), "{error}");
    }

    #[test]
    fn the_local_rank_is_the_number_of_the_device_and_too_few_devices_are_an_error() {
        let two = || vec![Device::flex(); 2];
        assert!(choose(Kind::Cuda, two(), 1).is_ok());
        let error = choose(Kind::Cuda, two(), 2).unwrap_err().to_string();
        assert!(error.contains("local rank 2") && error.contains("--nproc-per-node 2"), "{error}");
        let error = choose(Kind::Cuda, vec![Device::flex()], 1).unwrap_err().to_string();
        assert!(error.contains("scheduler") && error.contains("Device::cuda(0)"), "{error}");
        assert!(choose(Kind::Wgpu, Vec::new(), 0).unwrap_err().to_string().contains("driver"));
        // All processes have the same processors.
        assert!(choose(Kind::Flex, vec![Device::flex()], 7).is_ok());
    }

    #[test]
    fn without_a_launcher_the_first_device_is_taken() {
        assert_eq!(for_local_rank(Kind::Flex).unwrap(), Device::flex());
    }

    #[cfg(feature = "tch")]
    #[test]
    fn devices_of_libtorch_that_were_never_tried_are_refused() {
        assert_eq!(kind_of(&Device::libtorch().autodiff()).unwrap(), "libtorch");
        let error = check(&Device::libtorch_cuda(0)).unwrap_err().to_string();
        assert!(error.contains("Cuda(0)") && error.contains("the processors alone"), "{error}");
    }

    #[cfg(not(feature = "tch"))]
    #[test]
    fn a_kind_s_feature_may_have_another_name() {
        let error = Kind::LibTorch.devices().unwrap_err().to_string();
        assert!(error.contains("kind libtorch") && error.contains("feature `tch`"), "{error}");
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn kinds_that_were_not_built_name_their_feature() {
        let error = Kind::Cuda.devices().unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("feature `cuda`"), "{error}");
    }
}
