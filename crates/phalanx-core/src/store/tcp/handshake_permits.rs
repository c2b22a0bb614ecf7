//! Limits the number of TLS handshakes at once. Other clients wait.
//!
//! A client that has sent its ClientHello, and nothing more, costs little while it waits; once rustls has read it, it
//! costs more.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::sleep;

/// The most handshakes at once: the memory of more would be more than 4 KiB for each of a thousand strangers. With this many, and
/// 0.5 to 1.5 s for each, 853 get a permit at least within the 10 s that a client waits. Who waits in vain comes again.
const AT_ONCE: usize = 128;

#[derive(Debug)]
pub(super) struct HandshakePermits {
    free: Semaphore,
    waiting: Cell<usize>,
    /// A client has begun to wait.
    crowded: Notify,
}

/// The right to do a handshake, until it is dropped.
pub(super) struct HandshakePermit<'a> {
    limit: &'a HandshakePermits,
    _permit: SemaphorePermit<'a>,
}

impl HandshakePermits {
    pub fn new() -> Self {
        Self::of(AT_ONCE)
    }

    fn of(most: usize) -> Self {
        Self { free: Semaphore::new(most), waiting: Cell::new(0), crowded: Notify::new() }
    }

    /// Waits for a permit, in the order of arrival.
    pub async fn take(&self) -> io::Result<HandshakePermit<'_>> {
        let permit = match self.free.try_acquire() {
            Ok(permit) => permit,
            Err(_) => {
                let _waiting = Waiting::new(&self.waiting);
                self.crowded.notify_waiters();
                self.free.acquire().await.map_err(io::Error::other)?
            }
        };
        Ok(HandshakePermit { limit: self, _permit: permit })
    }
}

impl HandshakePermit<'_> {
    /// Waits for the end of `handshake`. When it has had the time that it has at `least`, it is given up if others wait.
    pub async fn run<T>(
        &self,
        least: Duration,
        handshake: impl Future<Output = io::Result<T>>,
    ) -> io::Result<T> {
        tokio::select! {
            biased;
            done = handshake => done,
            () = self.may_be_dropped(least) => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "its handshake is slow, and others wait"))
            }
        }
    }

    async fn may_be_dropped(&self, least: Duration) {
        sleep(least).await;
        while self.limit.waiting.get() == 0 {
            self.limit.crowded.notified().await;
        }
    }
}

/// Counts a waiting client, until this is dropped.
struct Waiting<'a>(&'a Cell<usize>);

impl<'a> Waiting<'a> {
    fn new(count: &'a Cell<usize>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::rc::Rc;

    use tokio::task::LocalSet;
    use tokio::time::timeout;

    use super::*;
    use crate::wire::auth::{MIN_HANDSHAKE_TIMEOUT, least_handshake_time};

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        LocalSet::new().block_on(&runtime, test);
    }

    #[test]
    fn who_has_had_its_time_gives_way_to_who_waits_and_not_before() {
        run(async {
            let limit = Rc::new(HandshakePermits::of(2));
            let (slow, quick) = (limit.take().await.unwrap(), limit.take().await.unwrap());
            // No client waits: it may take longer.
            let alone = timeout(
                MIN_HANDSHAKE_TIMEOUT * 2,
                slow.run(MIN_HANDSHAKE_TIMEOUT, pending::<io::Result<()>>()),
            )
            .await;
            assert!(alone.is_err());
            let shared = Rc::clone(&limit);
            let waiter = tokio::task::spawn_local(async move { shared.take().await.map(drop) });
            // A handshake that is done frees its turn: the other is still taken.
            quick.run(MIN_HANDSHAKE_TIMEOUT, async { Ok(()) }).await.unwrap();
            drop(quick);
            waiter.await.unwrap().unwrap();
            let _third = limit.take().await.unwrap();
            let shared = Rc::clone(&limit);
            let waiter = tokio::task::spawn_local(async move { shared.take().await.map(drop) });
            tokio::task::yield_now().await;
            let error = slow.run(MIN_HANDSHAKE_TIMEOUT, pending::<io::Result<()>>()).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            drop(slow);
            waiter.await.unwrap().unwrap();
            assert_eq!(limit.waiting.get(), 0);
        });
    }

    #[test]
    fn who_is_far_away_is_not_dropped_before_its_answer_can_be_there() {
        run(async {
            let limit = Rc::new(HandshakePermits::of(1));
            let far = limit.take().await.unwrap();
            let shared = Rc::clone(&limit);
            let waiter = tokio::task::spawn_local(async move { shared.take().await.map(drop) });
            tokio::task::yield_now().await;
            assert_eq!(limit.waiting.get(), 1);
            let least = least_handshake_time(MIN_HANDSHAKE_TIMEOUT);
            let answer = async {
                sleep(MIN_HANDSHAKE_TIMEOUT * 3 / 2).await;
                Ok(())
            };
            far.run(least, answer).await.unwrap();
            drop(far);
            waiter.await.unwrap().unwrap();
        });
    }

    #[test]
    fn turns_come_in_the_order_of_those_who_wait_and_who_leaves_is_forgotten() {
        run(async {
            let limit = Rc::new(HandshakePermits::of(1));
            let order = Rc::<std::cell::RefCell<Vec<usize>>>::default();
            let first = limit.take().await.unwrap();
            let tasks: Vec<_> = (0..4)
                .map(|number| {
                    let (limit, order) = (Rc::clone(&limit), Rc::clone(&order));
                    tokio::task::spawn_local(async move {
                        let _permit = limit.take().await.unwrap();
                        order.borrow_mut().push(number);
                    })
                })
                .collect();
            tokio::task::yield_now().await;
            assert_eq!(limit.waiting.get(), 4);
            tasks[1].abort();
            drop(first);
            for task in tasks {
                let _ = task.await;
            }
            assert_eq!((order.borrow().as_slice(), limit.waiting.get()), (&[0, 2, 3][..], 0));
        });
    }
}
