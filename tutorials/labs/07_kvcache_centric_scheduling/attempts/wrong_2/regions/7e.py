        alone_s, other_s = mean_tbt_terms(state, request)
        load = state.decode_load
        held = 0 if request.request_id in state.held else state.held.sequences
        most = state.decode_slots - request.n
        tbt = max(request.slo_tbt_s, alone_s + other_s * load.running)
        for _ in range(STEPS):
            others = load.sequences(now + ttft, now, tbt) + held
            found = alone_s + other_s * others
            if found >= tbt:
                return found
            tbt = found
        return tbt
