        small, main = self._small, self._main
        refused = {self._newcomer} if len(self) > self.capacity else set()
        limit = self._small_places + len(refused & small.keys())
        small_left, main_left = (len(queue) - len(refused & queue.keys()) for queue in (small, main))
        while small_left or main_left:
            if small_left and (len(small) >= limit or not main_left):
                item, uses = next(iter(small.items()))
                if item not in refused and uses > 1:
                    del small[item]
                    main[item] = 0
                    small_left, main_left = small_left - 1, main_left + 1
                    continue
                if item not in refused:
                    yield item
                    small[item] = 0
                    refused.add(item)
                    small_left -= 1
                small.move_to_end(item)
            else:
                item, uses = next(iter(main.items()))
                if item not in refused and uses > 0:
                    main[item] = uses - 1
                elif item not in refused:
                    yield item
                    refused.add(item)
                    main_left -= 1
                main.move_to_end(item)
        if len(self) > self.capacity:
            yield self._newcomer
