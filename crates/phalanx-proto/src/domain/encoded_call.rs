//! A call encoded in sixteen bytes, as it is in the slot headers of the control block.

use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::frame::{Call, Operation};

/// A call's operation, type, reduction, caller, root and number of elements. The `tuning` is left out.
pub type EncodedCall = [u8; 16];

const NO_ROOT: u32 = u32::MAX;

/// The call as bytes.
pub fn encode(call: &Call) -> EncodedCall {
    // As one number: a processor waits where it loads at once what was stored in parts.
    let reduce = call.reduce.map_or(0, ReduceOp::code);
    let caller = call.caller.map_or(0, |caller| caller as u8);
    let kinds = u32::from_le_bytes([call.operation as u8, call.dtype as u8, reduce, caller]);
    let root = call.root.map_or(NO_ROOT, Rank::get);
    let number = u128::from(call.elements) << 64 | u128::from(root) << 32 | u128::from(kinds);
    number.to_le_bytes()
}

/// The call that these bytes are, without `tuning`.
///
/// # Errors
/// If a number in it stands for nothing.
pub fn decode(bytes: &EncodedCall) -> Result<Call> {
    let unknown = || Error::protocol(format!("a rank of this host makes the unknown call {bytes:02x?}"));
    let [operation, dtype, reduce, caller, root @ ..] = *bytes;
    let (root, elements) = root.split_at(4);
    let root = u32::from_le_bytes(root.try_into().map_err(|_| unknown())?);
    Ok(Call {
        operation: Operation::ALL.into_iter().find(|known| *known as u8 == operation).ok_or_else(unknown)?,
        dtype: DType::from_wire(dtype).ok_or_else(unknown)?,
        reduce: match reduce {
            0 => None,
            code => Some(ReduceOp::from_wire(code).ok_or_else(unknown)?),
        },
        root: (root != NO_ROOT).then(|| Rank::new(root)),
        elements: u64::from_le_bytes(elements.try_into().map_err(|_| unknown())?),
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
    let Ok(call) = decode(bytes) else { return false };
    assert_eq!(encode(&call), *bytes);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_come_back_as_they_were() {
        let call = Call {
            operation: Operation::AllReduce,
            dtype: DType::BF16,
            elements: u64::MAX,
            reduce: Some(ReduceOp::Max),
            root: None,
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
        for call in [call, rooted] {
            assert_eq!(decode(&encode(&call)).unwrap(), call);
        }
        assert!(
            decode(&[0; 16]).is_err()
                && decode(&[255, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_err()
                && decode(&[255; 16]).is_err()
        );
    }
}
