//! Ranks in a grid: which ranks are in which group, and what is said if ranks disagree.

use std::sync::Barrier;
use std::time::Duration;

use phalanx::mesh::DeviceMesh;
use phalanx::testing::{Fabric, run};
use phalanx::trace::Trace;
use phalanx::{Error, ProcessGroup, Rank, ReduceOp};

/// Nothing in here may wait for this long.
fn patient(group: &ProcessGroup) -> ProcessGroup {
    group.with_timeout(Duration::from_secs(20))
}

/// The ranks of a group, as its members find them.
fn ranks(group: &ProcessGroup, own: Rank) -> Vec<u32> {
    let mut all = vec![0i64; group.world_size().count()];
    group.all_gather(&[i64::from(own.get())], &mut all).unwrap();
    all.into_iter().map(|rank| rank as u32).collect()
}

#[test]
fn each_rank_has_a_group_of_each_dimension() {
    for fabric in Fabric::ALL {
        run(6, fabric, |group| {
            let (group, own) = (patient(&group), group.rank());
            let mesh = DeviceMesh::new(&group, &[("data", 2), ("tensor", 3)]).unwrap();
            let (data, tensor) = (own.get() / 3, own.get() % 3);
            assert_eq!(mesh.names().collect::<Vec<_>>(), ["data", "tensor"]);
            assert_eq!((mesh.size("data").unwrap(), mesh.size("tensor").unwrap()), (2, 3));
            assert_eq!(mesh.coordinate("data").unwrap(), data as usize);
            assert_eq!(mesh.group("tensor").unwrap().rank().get(), tensor);
            assert_eq!(ranks(mesh.group("data").unwrap(), own), [tensor, tensor + 3]);
            assert_eq!(ranks(mesh.group("tensor").unwrap(), own), [3 * data, 3 * data + 1, 3 * data + 2]);
            let next = mesh.rank_at(&[("tensor", (tensor as usize + 1) % 3)]).unwrap();
            assert_eq!(next.get(), 3 * data + (tensor + 1) % 3);
            // As they are named: the other dimension runs faster.
            let all = mesh.flatten(&["tensor", "data"]).unwrap();
            assert_eq!(ranks(&all, own), [0, 3, 1, 4, 2, 5]);
            assert_eq!(
                ranks(&mesh.flatten(&["data"]).unwrap(), own),
                ranks(mesh.group("data").unwrap(), own)
            );
            group.barrier().unwrap();
        });
    }
}

#[test]
fn dimensions_of_one_rank_are_groups_of_one() {
    run(2, Fabric::SharedMemory, |group| {
        let mesh = DeviceMesh::new(&patient(&group), &[("data", 1), ("pipeline", 2), ("tensor", 1)]).unwrap();
        let mut loss = [3.0f32];
        mesh.group("tensor").unwrap().all_reduce(&mut loss, ReduceOp::Sum).unwrap();
        mesh.group("data").unwrap().all_reduce(&mut loss, ReduceOp::Sum).unwrap();
        assert_eq!(loss, [3.0]);
        mesh.group("pipeline").unwrap().all_reduce(&mut loss, ReduceOp::Sum).unwrap();
        assert_eq!(loss, [6.0]);
    });
}

#[test]
fn a_mesh_is_printed_as_a_table() {
    let tables = run(4, Fabric::TwoHosts, |group| {
        DeviceMesh::new(&patient(&group), &[("data", 2), ("tensor", 2)]).unwrap().to_string()
    });
    assert!(tables.iter().all(|table| *table == tables[0]));
    let host = tables[0].lines().nth(1).unwrap().split_whitespace().last().unwrap();
    let expected = format!(
        " rank  data  tensor  host\n    0     0       0  {host}\n    1     0       1  {host}\n    \
         2     1       0  {host}\n    3     1       1  {host}\nhosts     2       1  of each group"
    );
    assert_eq!(tables[0], expected);
}

#[test]
fn what_ranks_ask_for_is_compared_and_the_group_goes_on() {
    run(4, Fabric::Tcp, |group| {
        let group = patient(&group);
        let asked =
            if group.rank().get() == 2 { [("data", 4), ("tensor", 1)] } else { [("data", 2), ("tensor", 2)] };
        let error = DeviceMesh::new(&group, &asked).unwrap_err();
        assert!(error.is_mismatch(), "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 0 asks for data 2 x tensor 2, rank 2 for data 4 x tensor 1"), "{text}");
        let error = DeviceMesh::new(&group, &[("data", 3)]).unwrap_err();
        assert!(
            error.is_invalid_argument() && error.to_string().contains("has 3 ranks, and the group has 4"),
            "{error}"
        );

        let mesh = DeviceMesh::new(&group, &[("data", 2), ("tensor", 2)]).unwrap();
        let refused = |outcome: phalanx::Result<()>, cause: &str| {
            let error = outcome.unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains(cause), "{error}");
        };
        refused(mesh.group("model").map(drop), "no dimension \"model\", but data, tensor");
        refused(
            mesh.rank_at(&[("data", 2)]).map(drop),
            "the dimension \"data\" has size 2, and no coordinate 2",
        );
        refused(mesh.flatten(&[]).map(drop), "at least one dimension");
        refused(mesh.flatten(&["data", "data"]).map(drop), "\"data\" is named twice");
        // The mesh has both: without a comparison each rank would get a group, of other ranks than it has named.
        let asked: &[&str] = if group.rank().get() == 3 { &["tensor"] } else { &["data"] };
        let error = mesh.flatten(asked).unwrap_err();
        assert!(
            error.is_mismatch()
                && error.to_string().contains("rank 0 asks for [\"data\"], rank 3 for [\"tensor\"]"),
            "{error}"
        );
        mesh.flatten(&["tensor", "data"]).unwrap().barrier().unwrap();
        group.barrier().unwrap();
    });
}

#[test]
fn a_group_of_the_mesh_fails_by_itself() {
    run(4, Fabric::SharedMemory, |group| {
        let group = patient(&group);
        let mesh = DeviceMesh::new(&group, &[("data", 2), ("tensor", 2)]).unwrap();
        let tensor = mesh.group("tensor").unwrap();
        // Some may still be making their groups.
        group.barrier().unwrap();
        if mesh.coordinate("data").unwrap() == 0 {
            tensor.abort(Error::aborted("a layer has no numbers"));
        }
        group.barrier().unwrap();
        let mut value = [1.0f32];
        assert_eq!(
            tensor.all_reduce(&mut value, ReduceOp::Sum).is_err(),
            mesh.coordinate("data").unwrap() == 0
        );
        mesh.group("data").unwrap().all_reduce(&mut value, ReduceOp::Max).unwrap();
        group.barrier().unwrap();
    });
}

#[test]
fn a_failure_in_one_dimension_ends_all_groups_of_its_rank() {
    for fabric in Fabric::ALL {
        let made = Barrier::new(4);
        run(4, fabric, |group| {
            let group = patient(&group);
            let mesh = DeviceMesh::new(&group, &[("data", 2), ("tensor", 2)]).unwrap();
            let (data, tensor) = (mesh.group("data").unwrap(), mesh.group("tensor").unwrap());
            made.wait();
            if group.rank().get() == 2 {
                // Ranks have other numbers in each group: this is rank 3 of the first.
                tensor.abort_all(Error::timeout("no sum").with_peer(Rank::new(1)));
                assert_eq!(group.failure().unwrap().peer(), Some(Rank::new(3)));
                assert_eq!(data.failure().unwrap().peer(), None);
            }
            let affected = if group.rank().get() == 3 { tensor } else { data };
            let affected = if group.rank().get() == 1 { &group } else { affected };
            for failed in [affected, &group] {
                let error = failed.barrier().unwrap_err().to_string();
                assert!(error.contains("no sum"), "{error}");
            }
        });
    }
}

#[test]
fn a_group_of_an_adapter_stays() {
    let made = Barrier::new(2);
    run(2, Fabric::SharedMemory, |group| {
        let aside = patient(&group).new_group_aside(Trace::disabled()).unwrap();
        let other = patient(&group).split(Some(0), 0).unwrap().unwrap();
        made.wait();
        if group.rank() == Rank::MAIN {
            other.abort_all(Error::other("no sum"));
        }
        assert!(group.barrier().is_err());
        aside.barrier().unwrap();
    });
}
