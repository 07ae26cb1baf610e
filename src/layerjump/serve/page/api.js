// Asking the server. While it is busy it says our place in line, and we ask the same again.

const PAUSE = 200; // ms between two questions; the server itself waits with its answer
const BETWEEN_LOOKS = 400; // ms between two looks at a fit

export class Refused extends Error {}

async function once(path, body, signal) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  let response;
  try {
    response = await fetch(path, { ...options, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer. Is layerjump serve still running?");
  }
  const answer = await response.json();
  if (!response.ok && !answer.busy) throw new Refused(answer.error);
  return answer;
}

// `waiting` is told what the server says while we are in line.
export async function ask(path, body, { signal, waiting = () => {} } = {}) {
  for (;;) {
    const answer = await once(path, body, signal);
    if (!answer.busy) return answer;
    waiting(answer);
    await pause(PAUSE);
    signal?.throwIfAborted();
  }
}

// Fit, and tell `progress` about it until it is done.
export async function fit(model, estimators, { signal, progress }) {
  let job = await ask("/api/fit", { model, estimators }, { signal });
  while (job.state === "waiting" || job.state === "fitting") {
    progress(job);
    await pause(BETWEEN_LOOKS);
    job = await ask(`/api/jobs/${job.id}`, undefined, { signal });
  }
  if (job.state === "failed") throw new Refused(job.error);
}

function pause(ms) {
  return new Promise((resume) => setTimeout(resume, ms));
}
