//! What clients of the store and ranks say, as docs/wire.md draws it.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hmac::{Hmac, Mac};
use phalanx::store::{Store, TcpStore};
use sha2::Sha256;

use super::mutate::{Random, mutate};
use super::soon;

/// Where in the store ranks find each other.
const GROUP: &str = "phalanx/none/0/0/group/";
/// What a rank asks for first when all have come to the roll-call.
pub const MESH: &[u8] = b"/group/mesh/address";
/// How long a rank may take to answer a hello.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(200);

pub fn connect(address: SocketAddr) -> Option<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, super::LIMIT / 2).ok()?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).ok()?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT)).ok()?;
    Some(stream)
}

/// The opening of a client that knows no key, as PyTorch's, and then each request to the store. They touch no key of the job.
pub fn requests() -> Vec<Vec<u8>> {
    let text = |text: &[u8]| [&(text.len() as u64).to_le_bytes()[..], text].concat();
    let (key, other, value) = (text(b"/hostile/key"), text(b"/hostile/other"), text(&[b'7'; 40]));
    let (two, one) = (2u64.to_le_bytes(), 1i64.to_le_bytes());
    vec![
        [&[0][..], &0x3c85_f7ceu32.to_le_bytes(), &[13, 1, 2, 3, 4]].concat(),
        [&[1][..], &key, &value].concat(),
        [&[2][..], &key, &value, &value].concat(),
        [&[3][..], &key].concat(),
        [&[4][..], &other, &one].concat(),
        [&[5][..], &two, &key, &other].concat(),
        [&[6][..], &two, &key, &other].concat(),
        vec![7],
        [&[8][..], &key].concat(),
        [&[9][..], &key, &value].concat(),
        [&[10][..], &two, &key, &other].concat(),
        [&[11][..], &two, &key, &value, &other, &value].concat(),
        vec![12],
        vec![13, 4, 3, 2, 1],
        [&[14][..], &key, &value].concat(),
        [&[15][..], &key].concat(),
        [&[16][..], &key].concat(),
        vec![17],
        [&[18][..], &key, &one].concat(),
    ]
}

fn tag(secret: &[u8], label: &str, said: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).unwrap();
    mac.update(label.as_bytes());
    mac.update(&[0]);
    said.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// One who knows the secret of the ranks' group, and where they listen.
pub struct Insider {
    secret: [u8; 32],
    ranks: [SocketAddr; 2],
    /// How many of its hellos were answered.
    pub answered: AtomicUsize,
}

impl Insider {
    /// Reads the job's key, and what ranks 0 and 1 have left in the store.
    pub fn new(key: &Path, store: &TcpStore) -> Self {
        let text = fs::read_to_string(key).unwrap();
        let digits = text.trim().as_bytes().chunks(2);
        let key: Vec<u8> =
            digits.map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect();
        let verdict = store.get("phalanx/none/0/0/verdict", soon()).unwrap();
        let number = verdict.strip_prefix(b"ok ").unwrap();
        let address = |rank: u32| {
            // A socket's address of 4 bytes as postcard writes it: which kind, the address, the port.
            let bytes = store.get(&format!("{GROUP}mesh/address/{rank}"), soon()).unwrap();
            let port =
                u32::from(bytes[5] & 0x7f) | u32::from(bytes[6] & 0x7f) << 7 | u32::from(bytes[7]) << 14;
            assert_eq!(bytes[..5], [0, 127, 0, 0, 1]);
            SocketAddr::from((Ipv4Addr::LOCALHOST, u16::try_from(port).unwrap()))
        };
        Self {
            secret: tag(&key, "phalanx mesh 2", &[number]),
            ranks: [address(0), address(1)],
            answered: AtomicUsize::new(0),
        }
    }

    /// Poses as the last rank before rank 0 or 1, with something wrong in its hello or in its proof. False if nobody
    /// listens any more.
    pub fn pose(&self, random: &mut Random, held: &mut Vec<TcpStream>) -> bool {
        let to = random.below(2);
        let Some(mut stream) = connect(self.ranks[to]) else { return false };
        let hello = self.hello(to, random);
        if random.below(2) == 0 {
            let _ = stream.write_all(&wrong(random, &hello));
        } else {
            let mut answer = [0; 112];
            let told = stream.write_all(&hello).and_then(|()| stream.read_exact(&mut answer));
            if told.is_ok() {
                self.answered.fetch_add(1, Ordering::Relaxed);
                let proof = tag(&self.secret, "calls", &[&hello, &answer]);
                let _ = stream.write_all(&wrong(random, &proof));
            }
        }
        held.push(stream);
        let stay = random.below(16);
        held.drain(..held.len().saturating_sub(stay));
        true
    }

    fn hello(&self, to: usize, random: &mut Random) -> Vec<u8> {
        let mut hello = b"PHXH\x04\0".to_vec();
        hello.extend([1 + random.below(3) as u8, 0]);
        hello.extend(&tag(&self.secret, "name", &[])[..16]);
        hello.extend(0u64.to_le_bytes());
        for number in [super::RANKS - 1, to as u32, super::RANKS, 0] {
            hello.extend(number.to_le_bytes());
        }
        (0..4).for_each(|_| hello.extend(random.next().to_le_bytes()));
        hello
    }
}

/// `message`, of which something that counts is wrong: what comes after them is another message.
fn wrong(random: &mut Random, message: &[u8]) -> Vec<u8> {
    let mut changed = message.to_vec();
    (0..=random.below(3)).for_each(|_| mutate(random, &mut changed));
    if changed.starts_with(message) {
        changed[random.below(message.len())] ^= 1 << random.below(8);
    }
    changed
}
