//! Stands between a client and the job's store.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::{sleep, spawn};
use std::time::Duration;

/// Passes on what clients and the store say, until it is dropped.
pub struct Relay {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// What the clients have said.
    said: Vec<u8>,
    /// A client that sends this is held up.
    waits_at: Option<&'static [u8]>,
}

impl Relay {
    pub fn to(store: SocketAddr, waits_at: Option<&'static [u8]>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State { waits_at, ..State::default() }));
        let shared = Arc::downgrade(&state);
        spawn(move || {
            for client in listener.incoming().flatten() {
                // The last one says that nobody needs it any more.
                let Some(state) = shared.upgrade() else { return };
                let server = TcpStream::connect(store).unwrap();
                let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                spawn(move || drop((std::io::copy(&mut from, &mut to), to.shutdown(Shutdown::Both))));
                spawn(move || pass_on(client, server, &state));
            }
        });
        Self { address, state }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What the clients have said so far.
    pub fn said(&self) -> Vec<u8> {
        self.state.lock().unwrap().said.clone()
    }

    /// Lets go whoever is held up.
    pub fn release(&self) {
        self.state.lock().unwrap().waits_at = None;
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.release();
        self.state = Arc::default();
        let _ = TcpStream::connect(self.address);
    }
}

fn pass_on(mut client: TcpStream, mut server: TcpStream, state: &Mutex<State>) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = client.read(&mut buffer) {
        let words = &buffer[..count];
        state.lock().unwrap().said.extend_from_slice(words);
        let is_held = || {
            let waits_at = state.lock().unwrap().waits_at;
            waits_at.is_some_and(|at| words.windows(at.len()).any(|window| window == at))
        };
        while is_held() {
            sleep(Duration::from_millis(1));
        }
        if server.write_all(words).is_err() {
            break;
        }
    }
    let _ = server.shutdown(Shutdown::Both);
}
