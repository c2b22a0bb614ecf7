use super::*;
use crate::parts::Part;

const BYTES: usize = 64 << 20;

fn peer(arena: &Arena, nonce: u64) -> io::Result<Arc<Mapping>> {
    Arena::open(std::process::id(), arena.descriptor(), arena.bytes(), nonce)
}

#[test]
fn a_region_is_zero_and_peers_see_what_is_written_to_it() {
    let arena = Arena::create(BYTES, 1, 7).unwrap();
    let mut region = arena.alloc(5000).unwrap();
    assert_eq!(region.as_slice(), [0; 5000]);
    region.as_mut_slice()[4999] = 9;
    let offset = arena.find(region.as_slice()).unwrap();
    let peer = peer(&arena, 7).unwrap();
    // SAFETY: mapped, as `at` has checked, and not written meanwhile.
    assert_eq!(unsafe { peer.at(offset + 4999, 1).read() }, 9);
}

#[test]
fn only_whole_regions_are_found() {
    let arena = Arena::create(BYTES, 1, 7).unwrap();
    let (one, two) = (arena.alloc(5000).unwrap(), arena.alloc(PAGE).unwrap());
    assert!(arena.find(one.as_slice()).is_some() && arena.find(two.as_slice()).is_some());
    assert_eq!(arena.find(&one.as_slice()[..4999]), None);
    assert_eq!(arena.find(&one.as_slice()[1..]), None);
    assert_eq!(arena.find(&[0; 5000]), None);
    assert_eq!(arena.find(&[]), None);
}

#[test]
fn memory_that_comes_again_is_zero_again() {
    let arena = Arena::create(BYTES, 1, 7).unwrap();
    for _ in 0..3 {
        let mut region = arena.alloc(3 * PAGE).unwrap();
        assert!(region.as_slice().iter().all(|byte| *byte == 0));
        region.as_mut_slice().fill(1);
        assert_eq!(arena.find(region.as_slice()), Some(RESERVED));
    }
}

#[test]
fn the_staging_buffers_get_memory_when_the_arena_is_filled() {
    let arena = Arena::create_unfilled(BYTES, 1, 7).unwrap();
    let peer = peer(&arena, 7).unwrap();
    assert!(!arena.mapping().is_filled() && !peer.is_filled());
    let allocated = || rustix::fs::fstat(&arena.file).unwrap().st_blocks as usize * 512;
    assert!(allocated() >= control_block::STAGING);
    for _ in 0..2 {
        arena.fill().unwrap();
        assert!(allocated() >= control_block::ALLOCATED);
        assert!(arena.mapping().is_filled() && peer.is_filled());
    }
}

#[test]
fn the_rest_of_the_control_block_gets_memory_when_it_is_asked_for() {
    let arena = Arena::create(BYTES, 1, 7).unwrap();
    let allocated = || rustix::fs::fstat(&arena.file).unwrap().st_blocks as usize * 512;
    // Huge pages may make it more.
    assert!(allocated() >= control_block::ALLOCATED);
    for _ in 0..2 {
        arena.complete_control_block().unwrap();
        assert!(allocated() >= RESERVED);
    }
}

#[test]
fn too_little_memory_is_an_error() {
    let arena = Arena::create(BYTES, 1, 7).unwrap();
    let error = arena.alloc(BYTES).unwrap_err();
    assert!(error.to_string().contains("do not fit"), "{error}");
    assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
    assert!(arena.alloc(0).is_err() && arena.alloc(usize::MAX).is_err());
    let error = memory::check(usize::MAX / 2).unwrap_err();
    assert!(error.to_string().contains("are left"), "{error}");
}

#[test]
fn only_the_right_arena_is_opened() {
    let arena = Arena::create(BYTES, 1, 7).unwrap();
    assert!(peer(&arena, 8).is_err());
    let open = |bytes| Arena::open(std::process::id(), arena.descriptor(), bytes, 7);
    assert!(open(BYTES).is_ok());
    assert!(open(BYTES + PAGE).is_err() && open(BYTES - 1).is_err() && open(0).is_err());
    assert!(open(usize::MAX / PAGE * PAGE).is_err());
}

// qemu-user, which runs the tests for other processors, has no such flag.
#[cfg(target_arch = "x86_64")]
#[test]
fn no_mapping_of_an_arena_is_in_a_core_dump() {
    let arena = Arena::create(BYTES, 1, 7).unwrap();
    let peer = peer(&arena, 7).unwrap();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    for mapping in [arena.mapping(), &peer] {
        let start = format!("{:08x}-", mapping.base.as_ptr().addr());
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
    }
}

#[test]
fn what_a_late_peer_writes_does_not_reach_a_region_that_is_cut_off() {
    let arena = Arena::create(BYTES, 1, 7).unwrap();
    let mut region = arena.alloc(2 * PAGE).unwrap();
    region.as_mut_slice().fill(3);
    let offset = arena.find(region.as_slice()).unwrap();
    let late = peer(&arena, 7).unwrap();
    // SAFETY: this thread holds the region.
    unsafe { arena.cut_off(offset) }.unwrap();
    assert_eq!(arena.find(region.as_slice()), None);
    // SAFETY: mapped, as `at` has checked, and not read by any other thread.
    unsafe { late.at(offset, 2 * PAGE).write_bytes(9, 2 * PAGE) };
    assert!(region.as_slice().iter().all(|byte| *byte == 3));
    region.as_mut_slice().fill(4);
    drop(region);
    let next = arena.alloc(2 * PAGE).unwrap();
    assert_ne!(arena.find(next.as_slice()), Some(offset));
}

#[test]
fn a_region_that_is_cut_off_needs_its_memory_once() {
    let arena = Arena::create(BYTES, 1, 7).unwrap();
    let mut region = arena.alloc(2 * PIECE + 5).unwrap();
    for (index, byte) in region.as_mut_slice().iter_mut().enumerate() {
        *byte = (index % 251) as u8;
    }
    let blocks = || rustix::fs::fstat(&arena.file).unwrap().st_blocks * 512;
    let before = blocks();
    let offset = arena.find(region.as_slice()).unwrap();
    // SAFETY: this thread holds the region.
    unsafe { arena.cut_off(offset) }.unwrap();
    assert!(region.as_slice().iter().enumerate().all(|(index, byte)| *byte == (index % 251) as u8));
    assert!(before - blocks() >= 2 * PIECE as i64, "{before}, {}", blocks());
}

#[test]
fn a_part_takes_its_pages_with_it_and_the_others_keep_theirs() {
    let arena = Arena::create(BYTES, 1, 7).unwrap();
    let blocks = || rustix::fs::fstat(&arena.file).unwrap().st_blocks * 512;
    let empty = blocks();
    let region = arena.alloc(4 * PIECE).unwrap();
    let offset = arena.find(region.as_slice()).unwrap();
    let middle = PIECE + 5..3 * PIECE + 7;
    let mut parts = Part::of_region(region, [0..middle.start, middle.clone(), middle.end..4 * PIECE]);
    parts.iter_mut().for_each(|part| part.as_mut_slice().fill(3));
    drop(parts.remove(1));
    assert_eq!(blocks() - empty, 2 * PIECE as i64 + PAGE as i64);
    assert!(parts.iter().all(|part| part.as_slice().iter().all(|byte| *byte == 3)));
    drop(parts);
    assert_eq!(blocks(), empty);
    let next = arena.alloc(4 * PIECE).unwrap();
    assert_eq!(arena.find(next.as_slice()), Some(offset));
    assert!(next.as_slice().iter().all(|byte| *byte == 0));
}

#[test]
fn forked_siblings_make_arenas_with_identities_of_their_own() {
    let common = Arena::create(BYTES, 1, 7).unwrap();
    let region = common.alloc(PAGE).unwrap();
    let places = [RESERVED, RESERVED + 8];
    assert_eq!(common.find(region.as_slice()), Some(RESERVED));
    let children = places.map(|place| {
        // SAFETY: the child only allocates memory, which glibc allows in the child of a process with threads, makes system
        // calls, and never returns.
        match unsafe { libc::fork() } {
            0 => {
                let identity = Arena::create(BYTES, 1, 7).map_or(0, |arena| arena.mapping().identity());
                // SAFETY: eight bytes that the parent does not read before this process has ended.
                unsafe { common.mapping().at(place, 8).cast::<u64>().write(identity) };
                // SAFETY: it ends the process at once.
                unsafe { libc::_exit(0) }
            }
            pid => pid,
        }
    });
    children.into_iter().for_each(await_child);
    // SAFETY: the children have ended.
    let [one, two] = places.map(|place| unsafe { common.mapping().at(place, 8).cast::<u64>().read() });
    assert!(one != 0 && two != 0 && one != two, "{one} {two}");
}

#[test]
fn a_forked_process_neither_frees_nor_takes_memory_of_its_parent() {
    let arena = Arena::create(BYTES, 1, 7).unwrap();
    let mut region = arena.alloc(PAGE).unwrap();
    let mut parts = Part::of_region(arena.alloc(2 * PIECE).unwrap(), [0..PIECE, PIECE..2 * PIECE]);
    region.as_mut_slice().fill(3);
    parts.iter_mut().for_each(|part| part.as_mut_slice().fill(4));
    // SAFETY: the child only allocates and frees memory, which glibc allows in the child of a process with threads, makes system
    // calls, and never returns.
    let child = match unsafe { libc::fork() } {
        0 => {
            drop((region, parts));
            let is_taken = arena.alloc(PAGE).is_ok();
            // SAFETY: it ends the process at once.
            unsafe { libc::_exit(i32::from(is_taken)) }
        }
        pid => pid,
    };
    await_child(child);
    assert!(region.as_slice().iter().all(|byte| *byte == 3));
    assert!(parts.iter().all(|part| part.as_slice().iter().all(|byte| *byte == 4)));
}

/// Waits for a process that ends well.
fn await_child(pid: i32) {
    let (pid, options) = (rustix::process::Pid::from_raw(pid), rustix::process::WaitOptions::empty());
    let (_, status) = rustix::process::waitpid(pid, options).unwrap().unwrap();
    assert_eq!(status.exit_status(), Some(0));
}
