        terms, load = mean_tbt_terms(state, request), state.decode_load
        found = [max(request.slo_tbt_s, terms[0] + terms[1] * load.running)]
        while len(found) <= STEPS:
            others = load.sequences(at=now + ttft, now=now, tbt_s=found[-1])
            if request.request_id not in state.held:
                others += state.held.sequences
            others = sorted([0, others, state.decode_slots - request.n])[1]
            found.append(terms[0] + terms[1] * others)
            if found[-1] >= found[-2]:
                break
        return found[-1]
