//! A call encoded in a number of sixteen bytes, as it is in the slot headers of the control block.

use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::wire::frame::{Call, Operation};

/// A call's operation, type, reduction, caller, root or digest of its parts, and number of elements. The `tuning` is left out.
pub type EncodedCall = u128;

/// The call as a number.
#[inline]
pub fn encode(call: &Call) -> EncodedCall {
    let reduce = call.reduce.map_or(0, ReduceOp::code);
    let caller = call.caller.map_or(0, |caller| caller as u8);
    let kinds = u32::from_le_bytes([call.operation as u8, call.dtype as u8, reduce, caller]);
    u128::from(call.elements) << 64 | u128::from(call.root_or_parts()) << 32 | u128::from(kinds)
}

/// The call that this number stands for, without `tuning`.
///
/// # Errors
/// If a number in it stands for nothing.
pub fn decode(number: EncodedCall) -> Result<Call> {
    let unknown = || Error::malformed(format!("a rank of this host makes the unknown call {number:#034x}"));
    let [operation, dtype, reduce, caller] = (number as u32).to_le_bytes();
    let operation = Operation::ALL.into_iter().find(|known| *known as u8 == operation).ok_or_else(unknown)?;
    let (root, parts) = Call::read_root_or_parts(operation, (number >> 32) as u32);
    Ok(Call {
        operation,
        dtype: DType::from_wire(dtype).ok_or_else(unknown)?,
        reduce: match reduce {
            0 => None,
            code => Some(ReduceOp::from_wire(code).ok_or_else(unknown)?),
        },
        root,
        parts,
        elements: (number >> 64) as u64,
        tuning: 0,
        caller: match caller {
            0 => None,
            code => Some(Caller::from_wire(code).ok_or_else(unknown)?),
        },
    })
}

/// For `fuzzing`: decodes another rank's call.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let Some(bytes) = bytes.first_chunk() else { return false };
    let number = u128::from_le_bytes(*bytes);
    let Ok(call) = decode(number) else { return false };
    assert_eq!(encode(&call), number);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank::Rank;

    #[test]
    fn calls_come_back_as_they_were() {
        let call = Call {
            operation: Operation::AllReduce,
            dtype: DType::BF16,
            elements: u64::MAX,
            reduce: Some(ReduceOp::Max),
            root: None,
            parts: 0,
            tuning: 0,
            caller: Some(Caller::DdpBackward),
        };
        let rooted = Call {
            operation: Operation::Broadcast,
            reduce: None,
            root: Some(Rank::new(3)),
            caller: None,
            ..call
        };
        let parted = Call { operation: Operation::ReduceScatterV, parts: u32::MAX, ..call };
        for call in [call, rooted, parted] {
            assert_eq!(decode(encode(&call)).unwrap(), call);
        }
        for number in [0, 0x01_01_ff, u128::MAX] {
            assert!(decode(number).is_err());
        }
    }
}
