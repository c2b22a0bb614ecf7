//! Where the parameters of a unit lie in one row of elements, and which of them a rank has.
//!
//! Shards are ranges of elements, not whole parameters as in `ZeroRedundancyOptimizer`: between steps the whole
//! parameters are nowhere. A unit is one row, and a shard an equal part of it, so gathers and scatters need no copies
//! but into and out of the row.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::ParamId;
use burn::tensor::{DType as BurnDType, TensorData};
use phalanx::{DType, Error, Result};

use crate::parameters::Parameter;
use crate::tensor_bytes;

/// The parameters of a unit, one after the other, padded so that every rank's shard is equally long.
pub(super) struct FlatLayout {
    /// The unit's number among those of its [`ShardingGroup`](super::ShardingGroup).
    pub unit: usize,
    pub parameters: Vec<Parameter>,
    /// The position of each parameter in `parameters`.
    pub indices: HashMap<ParamId, usize>,
    /// The elements of each parameter.
    places: Vec<Range<usize>>,
    pub dtype: BurnDType,
    /// Elements without padding.
    pub elements: usize,
    /// Elements of each rank's shard.
    pub shard: usize,
    pub ranks: usize,
    /// Whether the parameters need a gradient; those of a frozen unit need none.
    pub is_trained: bool,
    /// A hash of the unit's tensors that are not sharded.
    pub frozen: u64,
}

impl FlatLayout {
    /// # Errors
    /// If the parameters are of different types, or of one that does not travel.
    pub fn new(unit: usize, parameters: Vec<Parameter>, ranks: usize) -> Result<Self> {
        let Some(dtype) = parameters.first().map(|parameter| parameter.dtype) else {
            return Err(Error::invalid_argument("a unit has no parameters"));
        };
        if let Some(other) = parameters.iter().find(|parameter| parameter.dtype != dtype) {
            return Err(Error::invalid_argument(format!(
                "`{}` is {:?} and `{}` is {dtype:?}: the parameters of a unit are sharded as one row of one type",
                other.name, other.dtype, parameters[0].name
            ))
            .with_remedy("cast them to one type, or make them units of their own"));
        }
        tensor_bytes::dtype_of(&parameters[0].name, dtype)?;
        let mut end = 0;
        let places = parameters.iter().map(|parameter| {
            let start = end;
            end += parameter.shape.iter().product::<usize>();
            start..end
        });
        let places = places.collect();
        let indices = parameters.iter().enumerate().map(|(index, parameter)| (parameter.id, index)).collect();
        Ok(Self {
            unit,
            indices,
            places,
            dtype,
            elements: end,
            shard: end.div_ceil(ranks),
            ranks,
            parameters,
            is_trained: true,
            frozen: 0,
        })
    }

    /// The type in which elements are sent.
    pub fn sent(&self) -> Result<DType> {
        tensor_bytes::dtype(self.dtype)
    }

    /// Elements with padding.
    pub fn padded(&self) -> usize {
        self.shard * self.ranks
    }

    /// The bytes of the whole row, with padding.
    pub fn bytes(&self) -> usize {
        self.padded() * self.dtype.size()
    }

    /// The elements of each rank.
    pub fn counts(&self) -> Vec<usize> {
        vec![self.shard; self.ranks]
    }

    /// The elements that `rank`'s shard has, without padding.
    pub fn own(&self, rank: usize) -> Range<usize> {
        (rank * self.shard).min(self.elements)..((rank + 1) * self.shard).min(self.elements)
    }

    /// The elements of the parameter `index` in `rank`'s shard, by their places in the row: none, if it is all in others'.
    pub fn piece(&self, index: usize, rank: usize) -> Range<usize> {
        let own = self.own(rank);
        let place = self.place_of(index);
        place.start.clamp(own.start, own.end)..place.end.clamp(own.start, own.end)
    }

    /// The same, in bytes.
    pub fn piece_bytes(&self, index: usize, rank: usize) -> Range<usize> {
        let (piece, size) = (self.piece(index, rank), self.dtype.size());
        piece.start * size..piece.end * size
    }

    /// The elements of the tensor that has that piece: at least one, which is then zero and stays so.
    pub fn piece_elements(&self, index: usize, rank: usize) -> usize {
        self.piece(index, rank).len().max(1)
    }

    /// The tensor that has the piece of the parameter `index`, from the `row` in which it lies.
    pub fn piece_data(&self, index: usize, rank: usize, row: &[u8]) -> Result<TensorData> {
        let elements = self.piece_elements(index, rank);
        let filler = vec![0; self.dtype.size()];
        let bytes = match self.piece_bytes(index, rank) {
            none if none.is_empty() => filler.as_slice(),
            place => row
                .get(place)
                .ok_or_else(|| Error::aborted("a unit's row is too short: this is a defect of phalanx"))?,
        };
        Ok(tensor_bytes::tensor_data(bytes, &[elements], self.dtype))
    }

    /// The bytes of each parameter in the row.
    pub fn places(&self) -> impl Iterator<Item = Range<usize>> {
        let size = self.dtype.size();
        self.places.iter().map(move |place| place.start * size..place.end * size)
    }

    /// The elements of the parameter `index` in the row.
    pub fn place_of(&self, index: usize) -> Range<usize> {
        self.places.get(index).cloned().unwrap_or(0..0)
    }

    /// The bytes of the parameter `index` in the row.
    pub fn place(&self, index: usize) -> Option<Range<usize>> {
        self.places().nth(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter(name: &str, shape: &[usize], dtype: BurnDType) -> Parameter {
        Parameter { id: ParamId::new(), name: name.to_owned(), shape: shape.to_vec(), dtype }
    }

    #[test]
    fn shards_are_equally_long_and_have_every_element_once() {
        let parameters = [parameter("a", &[3, 4], BurnDType::F32), parameter("b", &[5], BurnDType::F32)];
        for ranks in 1..=20 {
            let layout = FlatLayout::new(0, parameters.to_vec(), ranks).unwrap();
            assert_eq!(layout.elements, 17);
            assert!(layout.padded() >= 17 && layout.padded() < 17 + ranks);
            assert_eq!(layout.places().collect::<Vec<_>>(), [0..48, 48..68]);
            let mut end = 0;
            for rank in 0..ranks {
                let own = layout.own(rank);
                assert!(own.is_empty() || own.start == end, "{ranks} ranks, rank {rank}");
                end = end.max(own.end);
                let pieces: Vec<_> = (0..2).map(|index| layout.piece(index, rank)).collect();
                assert_eq!(pieces.iter().map(Range::len).sum::<usize>(), own.len());
                let is_in = |piece: &Range<usize>, of: Range<usize>| {
                    piece.is_empty() || of.start <= piece.start && piece.end <= of.end
                };
                assert!(is_in(&pieces[0], 0..12) && is_in(&pieces[1], 12..17), "{pieces:?}");
            }
            assert_eq!(end, 17);
        }
    }

    #[test]
    fn a_unit_of_two_types_is_refused() {
        let mixed = vec![parameter("a", &[3], BurnDType::F32), parameter("b", &[5], BurnDType::F16)];
        let Err(error) = FlatLayout::new(0, mixed, 2) else { panic!("it was taken") };
        assert!(error.to_string().contains("`b` is F16 and `a` is F32"), "{error}");
    }
}
