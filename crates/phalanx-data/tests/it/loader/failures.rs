//! Items and workers that fail, threads that end, and batches that do not come.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::thread::ThreadId;
use std::time::Instant;

use phalanx::Error;
use phalanx_data::{LoadError, worker_info};

use super::*;
use crate::support::ThreadCount;

#[test]
fn errors_and_panics_come_with_the_index_in_their_place() {
    for workers in [0, 1, 3] {
        let flawed = Function(12, |index: usize| match index {
            4 => Err(Error::other("broken file").with_remedy("copy it again")),
            7 => panic!("index {index} is odd"),
            _ => Ok(index),
        });
        let loader = DataLoader::builder(flawed).batch_size(3).num_workers(workers).build().unwrap();
        let all: Vec<Result<Vec<usize>, LoadError>> = loader.iter().collect();
        assert_eq!(all.len(), 4);
        assert_eq!((all[0].as_ref().unwrap(), all[3].as_ref().unwrap()), (&vec![0, 1, 2], &vec![9, 10, 11]));
        let (error, panic) = (all[1].as_ref().unwrap_err(), all[2].as_ref().unwrap_err());
        assert_eq!(
            (error.index(), error.is_panic(), panic.index(), panic.is_panic()),
            (Some(4), false, Some(7), true)
        );
        let text = Error::from(error.clone()).to_string();
        for word in ["item 4", "worker", "rank 0", "broken file (copy it again)"] {
            assert!(text.contains(word), "{text}");
        }
        assert!(panic.to_string().contains("panicked: index 7 is odd"), "{panic}");
        assert_eq!(error.worker().unwrap().id, if workers == 3 { 1 } else { 0 });
        assert_eq!(loader.epoch(), 1, "the pass has come to its end");
    }
}

#[test]
fn a_failed_collate_names_the_items_of_its_batch() {
    for workers in [0, 2] {
        let loader = DataLoader::builder(numbers(40)).batch_size(20).num_workers(workers);
        let loader = loader.collate(|items| match items[0] {
            0 => Err(Error::other("shapes differ")),
            _ => panic!("no memory"),
        });
        let all: Vec<Result<(), LoadError>> = loader.build().unwrap().iter().collect();
        let (error, panic) = (all[0].as_ref().unwrap_err(), all[1].as_ref().unwrap_err());
        assert_eq!((error.index(), error.indices().len(), panic.is_panic()), (None, 20, true));
        assert!(error.to_string().contains("items [0, 1, 2, 3, 4, 5, 6, 7, ..]"), "{error}");
        assert!(error.to_string().contains("shapes differ") && panic.to_string().contains("no memory"));
    }
}

#[test]
fn a_batch_is_made_of_one_item_after_the_other() {
    struct Counted(usize, Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.1.fetch_sub(1, Ordering::SeqCst);
        }
    }
    for workers in [0, 1] {
        let (held, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (now, peak) = (held.clone(), most.clone());
        let items = Function(50, move |index| {
            peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            Ok(Counted(index, now.clone()))
        });
        let loader = DataLoader::builder(items).batch_size(20).num_workers(workers).collate_each(
            Vec::with_capacity,
            |batch: &mut Vec<usize>, item| {
                assert!(worker_info().is_some());
                match item.0 {
                    23 => return Err(Error::other("another shape")),
                    45 => panic!("no memory"),
                    _ => batch.push(item.0),
                }
                Ok(())
            },
        );
        let loader = loader.build().unwrap();
        let all: Vec<Result<Vec<usize>, LoadError>> = loader.iter().collect();
        assert_eq!((all.len(), all[0].as_ref().unwrap()), (3, &numbers(20).items().to_vec()));
        assert_eq!(all[0].as_ref().unwrap().capacity(), 20);
        let (error, panic) = (all[1].as_ref().unwrap_err(), all[2].as_ref().unwrap_err());
        assert_eq!((error.indices(), panic.indices(), panic.is_panic()), (&[23][..], &[45][..], true));
        assert!(error.to_string().contains("the collate function, with the items [23]"), "{error}");
        assert_eq!(
            (most.load(Ordering::SeqCst), held.load(Ordering::SeqCst)),
            (1, 0),
            "no two items at once"
        );
    }
}

#[test]
fn a_failed_batch_is_loaded_again_by_whoever_resumes() {
    let loader = || {
        let flawed = Function(6, |index: usize| if index == 2 { Err(Error::other("no")) } else { Ok(index) });
        DataLoader::builder(flawed).batch_size(2).num_workers(2).build().unwrap()
    };
    let first = loader();
    let mut batches = first.iter();
    assert!(batches.next().unwrap().is_ok() && batches.next().unwrap().is_err());
    assert_eq!(first.position().consumed(), 2);
    // A loop that goes on has chosen to do without it.
    assert_eq!(batches.next().unwrap().unwrap(), [4, 5]);
    assert_eq!(first.position().consumed(), 6);
}

#[test]
fn a_rank_that_goes_on_without_a_failed_batch_stays_with_the_others() {
    let loader = |rank: u32, bad: usize| {
        let items = Function(30, move |index| match index == bad {
            true => Err(Error::aborted("a bad item")),
            false => Ok(index),
        });
        let sampler = ElasticSampler::new(30).shuffle(false);
        DataLoader::builder(items)
            .sampler(sampler)
            .shard(Rank::new(rank), world(3))
            .batch_size(2)
            .build()
            .unwrap()
    };
    let (first, second) = (loader(0, 9), loader(1, usize::MAX));
    let (mut ours, mut theirs) = (first.iter(), second.iter());
    for step in 0..4 {
        let (our, their) = (ours.next().unwrap(), theirs.next().unwrap());
        // The second step has 6 to 11 of all ranks; rank 2 dies in it, with 8 and 11.
        let (missing, ranks) =
            if step == 1 { (vec![Rank::new(2)], 2) } else { (vec![], if step == 0 { 3 } else { 2 }) };
        assert_eq!(our.is_err(), step == 1);
        if step == 2 {
            assert_eq!((our.unwrap(), their.unwrap()), (vec![8, 12], vec![11, 13]));
        }
        ours.regroup(&missing, Rank::MAIN, world(ranks));
        theirs.regroup(&missing, Rank::new(1), world(ranks));
        assert_eq!(first.position(), second.position(), "step {step}");
    }
}

#[test]
fn no_thread_outlives_its_iterator() {
    for (taken, items) in [(0, 400), (1, 400), (7, 400), (1000, 400), (3, 4)] {
        let count = ThreadCount::default();
        let entering = count.clone();
        let loader = DataLoader::builder(numbers(items)).batch_size(2).num_workers(6).prefetch_factor(8);
        let loader = loader.worker_init(move |_| {
            entering.enter();
            Ok(())
        });
        let loader = loader.build().unwrap();
        let mut batches = loader.iter();
        batches.by_ref().take(taken).for_each(|batch| drop(batch.unwrap()));
        drop(batches);
        assert_eq!(count.alive(), 0, "{taken} of {items}");
    }
}

#[test]
fn the_loop_drops_the_data_set_when_all_workers_have_ended() {
    struct Closing(Sender<ThreadId>);
    impl Drop for Closing {
        fn drop(&mut self) {
            let _ = self.0.send(std::thread::current().id());
        }
    }
    for workers in [0, 3] {
        let (closed, told) = channel();
        let closing = Closing(closed);
        let items = Function(60, move |index: usize| {
            let _open = &closing;
            Ok(index)
        });
        let mut batches = DataLoader::builder(items).num_workers(workers).build().unwrap().iter();
        batches.next().unwrap().unwrap();
        drop(batches);
        assert_eq!(told.try_recv().unwrap(), std::thread::current().id(), "{workers} workers");
    }
}

#[test]
fn threads_end_when_the_loop_panics_and_in_the_middle_of_a_batch() {
    let count = ThreadCount::default();
    let (entering, (items, read)) = (count.clone(), channel::<()>());
    let items = Mutex::new(items);
    // A batch that would take an hour.
    let slow = Function(1 << 20, move |index: usize| {
        std::thread::sleep(Duration::from_millis(2));
        let _ = items.lock().unwrap().send(());
        Ok(index)
    });
    let loader = DataLoader::builder(slow).batch_size(1 << 20).num_workers(2);
    let loader = loader.worker_init(move |_| {
        entering.enter();
        Ok(())
    });
    let loader = loader.build().unwrap();
    let panic = catch_unwind(AssertUnwindSafe(|| {
        let _batches = loader.iter();
        read.recv().unwrap();
        panic!("in the loop");
    }));
    assert!(panic.is_err());
    assert_eq!(count.alive(), 0);
}

#[test]
fn a_slow_loop_holds_no_more_batches_than_it_said() {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    for (workers, prefetch) in [(0, 2), (1, 1), (3, 2)] {
        let (held, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let peak = most.clone();
        let counted = Function(240, move |_| {
            peak.fetch_max(held.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            Ok(Counted(held.clone()))
        });
        let loader =
            DataLoader::builder(counted).batch_size(4).num_workers(workers).prefetch_factor(prefetch);
        for batch in loader.build().unwrap().iter() {
            std::thread::sleep(Duration::from_millis(1));
            drop(batch);
        }
        let most = most.load(Ordering::SeqCst);
        // Those ahead, and the loop's own.
        assert!(most <= 4 * (workers * prefetch + 1), "{most} items with {workers} workers");
        assert!(workers == 0 || most > 4, "{workers} workers stayed at {most}: nothing was loaded ahead");
    }
}

#[test]
fn a_batch_that_does_not_come_is_an_error_in_time() {
    let (free, blocked) = channel::<()>();
    let blocked = Mutex::new(blocked);
    let stuck = Function(4, move |index: usize| {
        if index == 2 {
            let _ = blocked.lock().unwrap().recv();
        }
        Ok(index)
    });
    let loader =
        DataLoader::builder(stuck).num_workers(1).prefetch_factor(3).timeout(Duration::from_millis(300));
    let loader = loader.build().unwrap();
    let mut batches = loader.iter();
    let begin = Instant::now();
    // A slow machine may be late with the others too.
    let error = batches.by_ref().find_map(Result::err).unwrap();
    // A pool that is dropped waits 5 s for its workers: not when it is known that one is late.
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert!(error.to_string().contains("timeout") && error.indices().len() == 1, "{error}");
    assert!(error.cause().is_timeout() && !error.cause().is_aborted(), "{error}");
    let text = error.to_string();
    let error = Error::from(error);
    assert!(error.is_timeout() && error.to_string() == text, "{error}");
    assert!(batches.next().is_none());
    drop(free);
    assert_eq!(loader.position().epoch(), 0, "what did not come was not seen");
}

#[test]
fn a_worker_that_cannot_be_readied_says_so_in_each_of_its_batches() {
    let loader = DataLoader::builder(numbers(4)).num_workers(2);
    let loader = loader.worker_init(|worker| match worker.id {
        1 => Err(Error::other("no device")),
        _ => Ok(()),
    });
    let all: Vec<_> = loader.build().unwrap().iter().collect();
    assert_eq!(all.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true, false]);
    assert!(all[1].as_ref().unwrap_err().to_string().contains("the start of a worker"));
}
