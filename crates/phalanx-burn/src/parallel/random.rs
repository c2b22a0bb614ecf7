//! The program's own random numbers, where passes are seeded.

use burn::tensor::{DType, Device, Distribution, Int, Tensor};

use crate::read_back;

/// Lets a device be seeded for a pass. When this is dropped, the device goes on with the program's own random numbers: as if one number had
/// been drawn, whatever the pass has drawn.
///
/// A device's random numbers belong to the process: what another thread draws meanwhile comes from the pass's, and changes those.
pub(super) struct OwnNumbers {
    device: Device,
    next: Option<u64>,
}

impl OwnNumbers {
    /// Keeps the program's random numbers of `device`.
    pub fn of(device: &Device) -> Self {
        // Some devices make integers from floats, which have 24 bits.
        let sixteen_bits = Distribution::Uniform(0.0, f64::from(1 << 16));
        // libtorch's have 64 bits in Burn, and every other device has those of 32.
        let dtype = if device.supports_dtype(DType::I32) { DType::I32 } else { DType::I64 };
        let drawn = Tensor::<1, Int>::random([4], sixteen_bits, (device, dtype));
        let next = read_back::data(drawn)
            .ok()
            .map(|drawn| drawn.iter::<i64>().fold(0, |next, part| next << 16 | part as u64));
        Self { device: device.clone(), next }
    }

    /// The number that was drawn, of which a pass's seed is made: what a pass draws then follows the program's seed.
    pub fn drawn(&self) -> u64 {
        self.next.unwrap_or_default()
    }
}

impl Drop for OwnNumbers {
    fn drop(&mut self) {
        if let Some(next) = self.next {
            self.device.seed(next);
        }
    }
}
