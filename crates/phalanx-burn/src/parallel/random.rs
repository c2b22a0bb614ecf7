//! The program's own random numbers, where passes are seeded.

use std::fmt;

use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use phalanx::Result;

use crate::read_back;

/// Lets a device be seeded for a pass. When this is dropped, the device goes on with the program's own random numbers: as if one number had
/// been drawn, whatever the pass has drawn.
///
/// A device's random numbers belong to the process: what another thread draws meanwhile comes from the pass's, and changes those.
pub(super) struct OwnNumbers {
    device: Device,
    next: u64,
}

impl OwnNumbers {
    /// Keeps the program's random numbers of `device`.
    ///
    /// # Errors
    /// If the device does not give the number that is drawn. Any other in its place would be the same in each pass, and so would be what
    /// the passes drop.
    pub fn of(device: &Device) -> Result<Self> {
        // Some devices make integers from floats, which have 24 bits.
        let sixteen_bits = Distribution::Uniform(0.0, f64::from(1 << 16));
        // libtorch's have 64 bits in Burn, and every other device has those of 32.
        let dtype = if device.supports_dtype(DType::I32) { DType::I32 } else { DType::I64 };
        let drawn = Tensor::<1, Int>::random([4], sixteen_bits, (device, dtype));
        Ok(Self { device: device.clone(), next: number(drawn.try_into_data())? })
    }

    /// The number that was drawn, of which a pass's seed is made: what a pass draws then follows the program's seed.
    pub fn drawn(&self) -> u64 {
        self.next
    }
}

impl Drop for OwnNumbers {
    fn drop(&mut self) {
        self.device.seed(self.next);
    }
}

/// The number of four parts with 16 bits each.
fn number<E: fmt::Debug>(drawn: std::result::Result<TensorData, E>) -> Result<u64> {
    let drawn = read_back::arrived(drawn, "the random number of which the seed of a pass is made")?;
    Ok(drawn.iter::<i64>().fold(0, |next, part| next << 16 | part as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_the_device_does_not_give_is_an_error() {
        let error = number::<&str>(Err("out of memory")).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("the random number") && text.contains("out of memory"), "{text}");
        assert!(error.remedy().is_some(), "{error}");
        let parts = TensorData::from([1_i32, 0, 0xffff, 2]);
        assert_eq!(number::<&str>(Ok(parts)).unwrap(), 0x0001_0000_ffff_0002);
    }
}
