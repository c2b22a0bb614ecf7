//! What goes before a tensor from one stage to another: its type and shape.

use burn::tensor::{DType, TensorData};
use phalanx::{Buffer, Error, ProcessGroup, Rank, Result};

use crate::tensor_bytes::{self, TensorBytes};

/// The most dimensions of a tensor between stages.
const MAX_DIMENSIONS: usize = 8;
/// The numbers of a header: kind, number of the message, type, dimensions, each one's size, and the link.
const WORDS: usize = 5 + MAX_DIMENSIONS;
/// Where the link is.
const LINK: usize = WORDS - 1;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A stage's output.
    Activation,
    /// One that takes no gradient: nothing that is trained has a part in it.
    Constant,
    /// The gradient of an activation.
    Gradient,
}

/// The type and the shape of a tensor between stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub dtype: DType,
    pub shape: Vec<usize>,
}

/// What is known of a tensor before it comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    /// Which tensor of its direction: a gradient has the number of the tensor of which it is one.
    pub number: u64,
    /// Of which link of the rank that has sent the tensor, for a gradient too. A pipeline has none.
    pub link: u64,
    pub layout: Layout,
}

impl Layout {
    pub fn of(tensor: TensorBytes<'_>, shape: &[usize]) -> Self {
        Self { dtype: tensor.dtype, shape: shape.to_vec() }
    }

    /// The tensor's size; an error if it is more than any memory.
    pub fn bytes(&self) -> Result<usize> {
        let elements = self.shape.iter().try_fold(1usize, |product, side| product.checked_mul(*side));
        elements.and_then(|elements| elements.checked_mul(self.dtype.size())).ok_or_else(|| {
            Error::mismatch(format!(
                "a peer announces a tensor of shape {:?}, which no memory holds",
                self.shape
            ))
        })
    }

    /// Memory for the tensor. A peer has sent its shape: if there is too little, that is an error and no panic.
    pub fn memory(&self) -> Result<Buffer> {
        let bytes = self.bytes()?;
        Buffer::try_zeroed(phalanx::DType::U8, bytes).map_err(|error| {
            Error::out_of_memory(format!("no memory for the {bytes} B of another stage's tensor"))
                .with_source(error)
                .with_remedy("make the micro-batches smaller")
        })
    }

    pub fn data(&self, buffer: &Buffer) -> TensorData {
        tensor_bytes::tensor_data(buffer.as_bytes(), &self.shape, self.dtype)
    }
}

impl Header {
    pub fn encode(&self) -> Result<[i64; WORDS]> {
        let Layout { dtype, shape } = &self.layout;
        if shape.len() > MAX_DIMENSIONS {
            return Err(Error::invalid_argument(format!(
                "a tensor between stages has at most {MAX_DIMENSIONS} dimensions, and not {}",
                shape.len()
            ))
            .with_remedy("reshape it"));
        }
        let mut words = [0; WORDS];
        words[0] = match self.kind {
            Kind::Activation => 1,
            Kind::Gradient => 2,
            Kind::Constant => 3,
        };
        words[1] = self.number as i64;
        words[2] = code(*dtype)?;
        words[3] = shape.len() as i64;
        for (word, side) in words[4..LINK].iter_mut().zip(shape) {
            *word = *side as i64;
        }
        words[LINK] = self.link as i64;
        Ok(words)
    }

    pub fn decode(words: &[i64; WORDS]) -> Result<Self> {
        let unknown =
            || Error::mismatch(format!("a peer announces a tensor with the unknown header {words:?}"));
        let kind = match words[0] {
            1 => Kind::Activation,
            2 => Kind::Gradient,
            3 => Kind::Constant,
            _ => return Err(unknown()),
        };
        let dimensions = usize::try_from(words[3]).ok().filter(|count| *count <= MAX_DIMENSIONS);
        let sides = words[4..LINK].iter().take(dimensions.ok_or_else(unknown)?);
        let shape = sides.map(|side| usize::try_from(*side)).collect::<std::result::Result<_, _>>();
        let dtype = TYPES.iter().find(|(_, code)| *code == words[2]).map(|(dtype, _)| *dtype);
        let (Ok(shape), Some(dtype)) = (shape, dtype) else { return Err(unknown()) };
        let (number, link) = (words[1] as u64, words[LINK] as u64);
        Ok(Self { kind, number, link, layout: Layout { dtype, shape } })
    }

    /// Receives the next header from `from`.
    pub fn receive(group: &ProcessGroup, from: Rank) -> Result<Self> {
        let mut words = [0; WORDS];
        group.recv(&mut words, from)?;
        Self::decode(&words)
    }
}

/// The types of activations.
const TYPES: [(DType, i64); 4] = [(DType::F32, 1), (DType::F64, 2), (DType::F16, 3), (DType::BF16, 4)];

fn code(dtype: DType) -> Result<i64> {
    let known = TYPES.iter().find(|(known, _)| *known == dtype);
    known.map(|(_, code)| *code).ok_or_else(|| {
        Error::invalid_argument(format!("tensors of type {dtype:?} do not go from stage to stage"))
            .with_remedy("cast it to f32, f64, f16 or bf16")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_and_nonsense_is_refused() {
        let layout = Layout { dtype: DType::BF16, shape: vec![3, 0, 7] };
        let header = Header { kind: Kind::Gradient, number: 5, link: u64::MAX, layout };
        let words = header.encode().unwrap();
        assert_eq!(Header::decode(&words).unwrap(), header);
        for (place, value) in [(0, 0), (0, 4), (2, 0), (2, 9), (3, -1), (3, 9), (4, -1)] {
            let mut other = words;
            other[place] = value;
            assert!(Header::decode(&other).unwrap_err().is_mismatch(), "{place} {value}");
        }
        let mut huge = words;
        (huge[4], huge[5]) = (i64::MAX, i64::MAX);
        assert!(Header::decode(&huge).unwrap().layout.memory().unwrap_err().is_mismatch());
        (huge[4], huge[5], huge[6]) = (1 << 60, 1, 1);
        let error = Header::decode(&huge).unwrap().layout.memory().unwrap_err();
        assert!(error.is_out_of_memory() && error.to_string().contains("no memory"), "{error}");
        let deep = Layout { dtype: DType::F32, shape: vec![1; 9] };
        assert!(Header { layout: deep, ..header.clone() }.encode().unwrap_err().is_invalid_argument());
        let whole = Layout { dtype: DType::I32, shape: vec![1] };
        assert!(Header { layout: whole, ..header }.encode().unwrap_err().is_invalid_argument());
    }
}
