//! Ranks in a grid with named dimensions, and a group for each line of it.
//!
//! Training that combines data, pipeline and tensor parallelism needs groups that lie across each other: those that hold the same
//! part of the model average gradients, those that hold the parts of one layer combine activations. A [`DeviceMesh`] makes them
//! once, under names.

use std::fmt;

use crate::caller::Caller;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::host;
use crate::rank::Rank;
use phalanx_proto::mesh::{Dimension, Layout};

/// The ranks of a group in a grid with named dimensions. PyTorch's `DeviceMesh`.
///
/// The last dimension's groups are ranks next to each other, on the same host where their number permits it, also if the launcher
/// has numbered the ranks in turn over the hosts. So put the dimension that communicates most last: tensor, then pipeline, then data.
///
/// ```
/// use phalanx::mesh::DeviceMesh;
/// use phalanx::{ProcessGroup, ReduceOp, WorldSize};
/// # let run = |group: ProcessGroup| -> phalanx::Result<()> {
/// let mesh = DeviceMesh::new(&group, &[("data", 2), ("tensor", 2)])?; // four ranks
/// let (data, tensor) = (mesh.group("data")?, mesh.group("tensor")?);
/// let mut part = [mesh.coordinate("tensor")? as f32];
/// tensor.all_reduce(&mut part, ReduceOp::Sum)?; // between the two ranks that share a layer
/// data.all_reduce(&mut part, ReduceOp::Avg)?; // between the two that hold the same part of it
/// assert_eq!(part, [1.0]);
/// # Ok(())
/// # };
/// # std::thread::scope(|scope| {
/// #     let groups = ProcessGroup::in_process(WorldSize::new(4)?)?;
/// #     let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| run(group))).collect();
/// #     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
/// # })?;
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// Each group is a [sub-group](ProcessGroup#groups-of-some-ranks), with connections and a failure of its own. A failure of one leaves
/// the others, and the group of the mesh, as they are: a rank that dies is named by each group that it was in.
#[doc(alias = "init_device_mesh")]
pub struct DeviceMesh {
    layout: Layout,
    /// The names of the hosts, by number.
    hosts: Vec<String>,
    place: usize,
    all: ProcessGroup,
    /// This rank's group of each dimension.
    groups: Vec<ProcessGroup>,
}

impl DeviceMesh {
    /// Places the ranks of `group` in a grid of these dimensions, a name and a size each, and makes each rank's group of each
    /// dimension. The product of the sizes is the world size.
    ///
    /// Every rank must call it, with the same dimensions, and in the same order as its collectives. A dimension of size 1 costs
    /// no connection, so a program can have the same dimensions on any number of ranks.
    ///
    /// # Errors
    /// On every rank, if there is no dimension or more than eight, a name is empty or comes twice, a size is 0, or the product is
    /// not the world size; if the ranks ask for different dimensions, and then the error shows two of them. If one of the groups cannot be
    /// made, which ends `group` on every rank. As [`split`](ProcessGroup::split).
    pub fn new(group: &ProcessGroup, dimensions: &[(&str, usize)]) -> Result<Self> {
        let all = group.in_call(Caller::DeviceMeshNew);
        let dimension = |(name, size): &(&str, usize)| Dimension { name: (*name).to_owned(), size: *size };
        let own: Vec<Dimension> = dimensions.iter().map(dimension).collect();
        // Before what this rank's own argument is found to be: the others wait here.
        let (asked, hosts): (Vec<Vec<Dimension>>, Vec<(String, String)>) =
            all.all_gather_object(&(own.clone(), (group.host_identity(), host::name())))?.into_iter().unzip();
        if let Some(other) = asked.iter().position(|other| *other != asked[0]) {
            return Err(Error::mismatch(format!(
                "the ranks disagree on the mesh: rank 0 asks for {}, rank {other} for {}",
                shown(&asked[0]),
                shown(&asked[other])
            ))
            .with_peer(Rank::new(other as u32))
            .with_remedy("every rank must call DeviceMesh::new with the same dimensions"));
        }
        let layout = Layout::new(own, &hosts)?;
        let place = layout.place(group.rank());
        let made = layout.dimensions().iter().enumerate().map(|(index, Dimension { name, .. })| {
            let group = part(&all, &layout, place, &[index]);
            // The ranks of other groups wait for this one in the next dimension.
            group.map_err(|error| {
                all.fail_half_way(&format!("make its group of the dimension {name:?}"), &error)
            })
        });
        let groups = made.collect::<Result<Vec<ProcessGroup>>>()?;
        let mut names: Vec<(usize, String)> = (0..hosts.len())
            .map(|place| layout.at_place(place))
            .map(|(rank, host)| (host, hosts[rank.index()].1.clone()))
            .collect();
        names.dedup_by_key(|(host, _)| *host);
        let hosts = names.into_iter().map(|(_, name)| name).collect();
        Ok(Self { layout, hosts, place, all: group.clone(), groups })
    }

    /// The names of the dimensions, in their order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.layout.dimensions().iter().map(|dimension| dimension.name.as_str())
    }

    /// The group of the ranks that differ from this one in nothing but the coordinate `name`. A rank in it is that coordinate.
    ///
    /// # Errors
    /// If the mesh has no such dimension.
    #[doc(alias = "get_group")]
    pub fn group(&self, name: &str) -> Result<&ProcessGroup> {
        self.layout.dimension(name).map(|index| &self.groups[index])
    }

    /// The number of ranks along the dimension `name`.
    ///
    /// # Errors
    /// As [`group`](Self::group).
    pub fn size(&self, name: &str) -> Result<usize> {
        self.layout.dimension(name).map(|index| self.layout.dimensions()[index].size)
    }

    /// This rank's coordinate along the dimension `name`, from 0.
    ///
    /// # Errors
    /// As [`group`](Self::group).
    #[doc(alias = "get_local_rank")]
    pub fn coordinate(&self, name: &str) -> Result<usize> {
        self.layout.dimension(name).map(|index| self.layout.coordinates(self.place)[index])
    }

    /// The rank, in the group that the mesh was made of, whose coordinates are this rank's but for those given. The next stage of a
    /// pipeline is `mesh.rank_at(&[("pipeline", mesh.coordinate("pipeline")? + 1)])`.
    ///
    /// # Errors
    /// If the mesh has no such dimension, or a coordinate is not below its size.
    pub fn rank_at(&self, coordinates: &[(&str, usize)]) -> Result<Rank> {
        let mut at = self.layout.coordinates(self.place);
        for (name, coordinate) in coordinates {
            let index = self.layout.dimension(name)?;
            let size = self.layout.dimensions()[index].size;
            if *coordinate >= size {
                return Err(Error::invalid_argument(format!(
                    "the dimension {name:?} has size {size}, and no coordinate {coordinate}"
                ))
                .with_remedy(format!("give one from 0 to {}", size - 1)));
            }
            at[index] = *coordinate;
        }
        Ok(self.layout.at_place(self.layout.place_at(&at)).0)
    }

    /// Makes one group of several dimensions: of the ranks that differ from this one in nothing but the coordinates `names`.
    /// The last of these runs fastest. For gradients of what is replicated along two dimensions, or a norm over the whole model.
    ///
    /// Every rank must call it, with the same names, and in the same order as its collectives.
    ///
    /// # Errors
    /// On every rank, if there is no name, one comes twice, or the mesh has no such dimension; if the ranks name different dimensions, and
    /// then the error shows two of them. As [`split`](ProcessGroup::split).
    #[doc(alias = "_flatten")]
    pub fn flatten(&self, names: &[&str]) -> Result<ProcessGroup> {
        let all = self.all.in_call(Caller::DeviceMeshFlatten);
        // Before what this rank's own argument is found to be: the others wait here.
        let own: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let asked: Vec<Vec<String>> = all.all_gather_object(&own)?;
        if let Some(other) = asked.iter().position(|other| *other != asked[0]) {
            return Err(Error::mismatch(format!(
                "the ranks disagree on a group of the mesh: rank 0 asks for {:?}, rank {other} for {:?}",
                asked[0], asked[other]
            ))
            .with_peer(Rank::new(other as u32))
            .with_remedy("every rank must call DeviceMesh::flatten with the same names, in the same order"));
        }
        let along: Vec<usize> =
            names.iter().map(|name| self.layout.dimension(name)).collect::<Result<_>>()?;
        let twice = along.iter().enumerate().find(|(index, dimension)| along[..*index].contains(dimension));
        match twice {
            Some((index, _)) => {
                Err(Error::invalid_argument(format!("the dimension {:?} is named twice", names[index])))
            }
            None if along.is_empty() => Err(Error::invalid_argument("name at least one dimension")),
            None => part(&all, &self.layout, self.place, &along),
        }
    }
}

/// The group of the ranks that differ from `place` in nothing but `along`.
fn part(all: &ProcessGroup, layout: &Layout, place: usize, along: &[usize]) -> Result<ProcessGroup> {
    let (color, key) = layout.split(place, along);
    // Both are less than the world size.
    let group = all.split(Some(color as u32), key as i64)?;
    group.ok_or_else(|| Error::aborted("a rank with a color is in no group: this is a defect of phalanx"))
}

fn shown(dimensions: &[Dimension]) -> String {
    let sizes: Vec<String> = dimensions.iter().map(|it| format!("{} {}", it.name, it.size)).collect();
    sizes.join(" x ")
}

/// A table: each rank, its coordinates and its host, and on how many hosts the groups of each dimension are.
impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dimensions = self.layout.dimensions();
        let width = |dimension: &Dimension| dimension.name.chars().count().max(4);
        write!(f, "{:>5}", "rank")?;
        for dimension in dimensions {
            write!(f, "  {:>width$}", dimension.name, width = width(dimension))?;
        }
        writeln!(f, "  host")?;
        let world: usize = dimensions.iter().map(|dimension| dimension.size).product();
        for place in 0..world {
            let (rank, host) = self.layout.at_place(place);
            write!(f, "{:>5}", rank.get())?;
            for (dimension, coordinate) in dimensions.iter().zip(self.layout.coordinates(place)) {
                write!(f, "  {coordinate:>width$}", width = width(dimension))?;
            }
            writeln!(f, "  {}", self.hosts[host])?;
        }
        write!(f, "hosts")?;
        for (index, dimension) in dimensions.iter().enumerate() {
            write!(f, "  {:>width$}", self.layout.hosts_of_a_group(index), width = width(dimension))?;
        }
        write!(f, "  of each group")
    }
}

impl fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMesh({})", shown(self.layout.dimensions()))
    }
}
